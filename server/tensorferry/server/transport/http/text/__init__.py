"""The text endpoints that applications speak: those of OpenAI, of Text Embeddings Inference, and of rerankers."""
