"""The text endpoints of a real server: answers beside ONNX Runtime alone, the clients that applications use, and errors."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from support.models import sentence_encoder
from support.processes.server import ServerProcess, running
from support.wire.programs import CLIENTS, needs, report_of
from tokenizers import Tokenizer

PYTHON = CLIENTS / "text" / "bin" / "python"
CLIENT = Path(__file__).resolve().parents[2] / "support" / "wire" / "text_clients.py"
TEXTS = ["a man is eating", "the woman is riding a horse", "my food"]
APP = """
from tensorferry.serving import classifier, embeddings, onnx, pipeline, reranker, tokenizer

embed = embeddings(
    "embed", tokenizer("tokenizer.json"), onnx("tokens.onnx"), pooling="mean", served_as=["text-embedding-3-small"]
)
first, last = (
    embeddings(pooling, tokenizer("tokenizer.json"), onnx("tokens.onnx"), pooling=pooling, normalize=False)
    for pooling in ("first", "last")
)
pooled = pipeline("pooled", tokenizer("tokenizer.json"), onnx("minilm.onnx"), task="embedding")
tokens = pipeline(
    "tokens",
    tokenizer("tokenizer.json"),
    onnx("tokens.onnx"),
    outputs=["last_hidden_state", "attention_mask"],
    task="token_embedding",
)
rank = reranker("rank", tokenizer("tokenizer.json", input=("query", "text")), onnx("rank.onnx"))
listed = pipeline("listed", tokenizer("tokenizer.json", outputs=["token_list"]), task="tokenize")
kind = classifier("kind", tokenizer("tokenizer.json"), onnx("kind.onnx"), labels=["a", "b", "c"])
"""

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoders of tokens, of pairs to one logit and of texts to three, with a tokenizer and the file that declares them."""
    made = tmp_path_factory.mktemp("text")
    sentence_encoder.build(made)

    def tokens() -> onnx.ModelProto:
        return sentence_encoder.without_pooling(onnx.load(made / "minilm.onnx"))

    onnx.save(tokens(), made / "tokens.onnx")
    onnx.save(sentence_encoder.with_logits(tokens(), 1), made / "rank.onnx")
    onnx.save(sentence_encoder.with_logits(tokens(), 3), made / "kind.onnx")
    (made / "app.py").write_text(APP)
    return made


@pytest.fixture(scope="module")
def server(transport: str, folder: Path) -> Iterator[ServerProcess]:
    with running(folder / "app.py", "--http-port", "0", transport=transport) as server:
        yield server


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[..., Array]:
    """Run a file with ONNX Runtime on one text, or one pair, after the tokenizer alone."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def run(file: str, text: str, pair: str | None = None) -> Array:
        encoded = tokenizer.encode(text, pair)
        session = onnxruntime.InferenceSession(folder / file)
        given = {
            "input_ids": [encoded.ids],
            "attention_mask": [encoded.attention_mask],
            "token_type_ids": [encoded.type_ids],
        }
        (output,) = session.run(None, {name: np.array(value, np.int64) for name, value in given.items()})
        return np.array(output[0], np.float32)

    return run


@pytest.fixture(scope="module")
def vectors(alone: Callable[..., Array]) -> Array:
    """The mean vectors of TEXTS, of length 1."""
    made = np.stack([alone("tokens.onnx", text).mean(axis=0) for text in TEXTS])
    scaled: Array = made / np.linalg.norm(made, axis=1, keepdims=True)
    return scaled


def post(server: ServerProcess, path: str, body: Any) -> Any:
    """Return the JSON of an answer; of an error, its status and its JSON."""
    request = Request(server.ready["http"] + path, None if body is None else json.dumps(body).encode())
    try:
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


@needs(CLIENTS / "text" / ".done")
def test_clients_of_openai_langchain_cohere_and_hugging_face(
    server: ServerProcess, vectors: Array, alone: Callable[..., Array]
) -> None:
    report = report_of(PYTHON, CLIENT, server.ready["http"], tensors={})
    of_openai = report["openai"]
    short = vectors[:, :2] / np.linalg.norm(vectors[:, :2], axis=1, keepdims=True)
    np.testing.assert_allclose(of_openai["short"], short, atol=1e-5)
    np.testing.assert_allclose(of_openai["one"], vectors[0], atol=1e-6)
    for given in (
        of_openai["default"],
        of_openai["float"],
        report["langchain"]["documents"],
        report["hugging_face"]["embed"],
    ):
        np.testing.assert_allclose(given, vectors, atol=1e-6)
    np.testing.assert_allclose(report["langchain"]["query"], vectors[0], atol=1e-6)
    # Nine digits are the same FP32 numbers as the bytes.
    assert np.array_equal(np.float32(of_openai["default"]), np.float32(of_openai["float"]))
    assert (of_openai["model"], of_openai["tokens"]) == ("embed", 6)
    assert of_openai["retrieved"] == "text-embedding-3-small"
    assert {"embed", "text-embedding-3-small", "rank"} <= set(of_openai["models"])
    assert [name for name, _ in of_openai["errors"]] == ["NotFoundError"] + 3 * ["BadRequestError"]
    assert "check_embedding_ctx_length=False" in of_openai["errors"][2][1]
    assert "give one as 'model', or in the path" in of_openai["errors"][3][1]
    assert of_openai["concurrent"] == [*range(1, 65)]
    logits = [float(alone("rank.onnx", TEXTS[2], text)[0]) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda at: -logits[at])
    for results in report["cohere"]:
        assert [at for at, _ in results] == order
        np.testing.assert_allclose(
            [score for _, score in results], _sigmoid([logits[at] for at in order]), atol=1e-6
        )
    assert report["hugging_face"]["failure"] == 422


def _sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-np.array(values)))


def test_each_pooling(server: ServerProcess, alone: Callable[..., Array]) -> None:
    tokens = [alone("tokens.onnx", text) for text in TEXTS]
    for model, at in (("first", 0), ("last", -1)):
        answer = post(server, f"/models/{model}/embed", {"inputs": TEXTS})
        np.testing.assert_allclose(answer, [each[at] for each in tokens], atol=1e-5)
        scaled = post(server, f"/models/{model}/embed", {"inputs": TEXTS, "normalize": True})
        np.testing.assert_allclose(scaled, answer / np.linalg.norm(answer, axis=1, keepdims=True), atol=1e-6)
        cut = post(server, f"/models/{model}/embed", {"inputs": TEXTS, "normalize": False, "dimensions": 7})
        np.testing.assert_array_equal(cut, np.asarray(answer)[:, :7])
    answer = post(server, "/v1/embeddings", {"model": "pooled", "input": TEXTS, "encoding_format": "base64"})
    given = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer["data"]]
    np.testing.assert_allclose(given, [alone("minilm.onnx", text) for text in TEXTS], atol=1e-6)
    # A pipeline without the output `tokens` cannot count them.
    assert answer["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


def test_vectors_of_all_tokens(server: ServerProcess, alone: Callable[..., Array]) -> None:
    # More texts than a batch holds, so that they are divided by length.
    for texts in (TEXTS[:1], TEXTS, TEXTS * 20):
        for path in ("/embed_all", "/models/tokens/embed_all"):
            answer = post(server, path, {"inputs": texts})
            for given, text in zip(answer, texts, strict=True):
                np.testing.assert_allclose(given, alone("tokens.onnx", text), atol=1e-5)


def test_tokens(server: ServerProcess, folder: Path) -> None:
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole.no_truncation()
    # The last text has more tokens than the encoder takes.
    texts = [*TEXTS, "my food " * 100]
    answer = post(server, "/tokenize", {"inputs": texts})
    for tokens, text in zip(answer, texts, strict=True):
        assert [token["id"] for token in tokens] == whole.encode(text).ids
        assert [token["text"] for token in tokens[1:-1]] == text.split()
        assert [text[token["start"] : token["stop"]] for token in tokens[1:-1]] == text.split()
    plain = post(server, "/models/listed/tokenize", {"inputs": TEXTS[0], "add_special_tokens": False})
    assert plain == [[token for token in answer[0] if not token["special"]]]


def test_json_has_a_bound_for_vectors_of_tokens(server: ServerProcess) -> None:
    # 32 tokens of 384 numbers each.
    status, error = post(server, "/embed_all", {"inputs": ["a " * 30] * 86})
    assert (status, error["error_type"]) == (422, "Validation")
    assert "the 2752 tokens of 'inputs' have vectors of 384 numbers each, and JSON has at" in error["error"]


def test_many_clients_get_their_own_vectors(server: ServerProcess, vectors: Array) -> None:
    def call(number: int) -> Any:
        return post(server, "/embed", {"model": "embed", "inputs": TEXTS[number % 3 :] * (1 + number % 50)})

    with ThreadPoolExecutor(16) as threads:
        for number, answer in enumerate(threads.map(call, range(200))):
            expected = np.concatenate([vectors[number % 3 :]] * (1 + number % 50))
            np.testing.assert_allclose(answer, expected, atol=1e-5)


def test_classes(server: ServerProcess, alone: Callable[..., Array]) -> None:
    logits = [alone("kind.onnx", text) for text in TEXTS]
    raw = post(server, "/predict", {"inputs": [[text] for text in TEXTS], "raw_scores": True})
    for given, expected in zip(raw, logits, strict=True):
        assert [each["label"] for each in given] == ["abc"[at] for at in np.argsort(-expected)]
        np.testing.assert_allclose([each["score"] for each in given], -np.sort(-expected), atol=1e-5)
    one = {each["label"]: each["score"] for each in post(server, "/predict", {"inputs": TEXTS[0]})}
    shares = np.exp(logits[0]) / np.exp(logits[0]).sum()
    np.testing.assert_allclose([one[label] for label in "abc"], shares, atol=1e-6)


def test_rerankers_dialects(server: ServerProcess, alone: Callable[..., Array]) -> None:
    logits = [float(alone("rank.onnx", "food", text)[0]) for text in TEXTS]
    best = int(np.argmax(logits))
    tei = post(server, "/rerank", {"query": "food", "texts": TEXTS, "raw_scores": True, "return_text": True})
    assert (tei[0]["index"], tei[0]["text"]) == (best, TEXTS[best])
    np.testing.assert_allclose(tei[0]["score"], logits[best], atol=1e-5)
    body = {
        "query": "food",
        "documents": [{"text": text} for text in TEXTS],
        "top_n": 1,
        "return_documents": True,
    }
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        (only,) = post(server, path, body)["results"]
        assert (only["index"], only["document"]) == (best, {"text": TEXTS[best]})
        np.testing.assert_allclose(only["relevance_score"], _sigmoid(logits[best]), atol=1e-6)
    for pair in (("text_1", "text_2"), ("queries", "documents")):
        data = post(server, "/score", dict(zip(pair, ("food", TEXTS), strict=True)))["data"]
        np.testing.assert_allclose([each["score"] for each in data], _sigmoid(logits), atol=1e-6)


def test_errors_have_the_form_of_their_path(server: ServerProcess) -> None:
    status, error = post(server, "/v1/embeddings", {"input": "a"})
    assert (status, error["error"]["type"]) == (400, "invalid_request_error")
    assert (
        "more than one model has the task 'embedding'; give one as 'model', or" in error["error"]["message"]
    )
    assert post(server, "/v1/nothing", {})[1]["error"]["message"].startswith(
        "there is no path /v1/nothing; GET /v2/models"
    )
    assert post(server, "/v1/rerank", {"query": 1}) == (400, {"message": "'query' must be a string"})
    for path in ("/predict", "/tokenize", "/models/listed/tokenize"):
        assert post(server, path, {"inputs": 1})[1]["error_type"] == "Validation"
    for path in ("/v1/score", "/score"):
        assert post(server, path, {})[1]["error"]["type"] == "invalid_request_error"
    assert post(server, "/predict", {"inputs": ["a", "b"]}) == (
        422,
        {"error": "model 'kind' takes single texts, and the request has pairs", "error_type": "Validation"},
    )
    assert post(server, "/v2/models/nothing", None)[0] == 404
    several = "this path is for a server with one model, but 8 are ready; use /v2/models/NAME/infer"
    assert post(server, "/invocations", {"inputs": []}) == (400, {"error": several})


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": "a", "model": "kind"}, "has the task 'classify', but this path needs"),
        ("/v1/embeddings", {"input": "a", "model": 1}, "'model' is 1; it must be a string"),
        ("/v1/embeddings", {"input": ["a", 1]}, "'input' must be a string or a list of strings"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "'input' has 2049 texts; it must have 1 to 2048"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "'encoding_format' is hex"),
        ("/v1/embeddings", {"input": "a", "model": "embed", "dimensions": 385}, "vectors have 384 numbers"),
        ("/v1/embeddings", {"input": "a", "dimensions": True}, "'dimensions' is true; it must be an integer"),
        ("/v1/embeddings", {"input": "\ud800", "model": "embed"}, "half a surrogate pair"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, "'prompt_name' is not supported"),
        (
            "/embed",
            {"inputs": "a", "model": "embed", "normalize": False},
            "scales its vectors to length 1; send true",
        ),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "'truncation_direction' must be"),
        (
            "/embed_all",
            {"inputs": "a", "model": "embed"},
            "has the task 'embedding', but this path needs 'token_",
        ),
        ("/v1/embeddings", {"input": [[1]]}, "'input': token ids are not taken"),
        ("/predict", {"inputs": [["a"], ["a", "b"]]}, "'inputs' must have one string each, or two"),
        ("/predict", {"inputs": {"a": 1}}, "'inputs' must be a string, a pair"),
        ("/rerank", {"query": "a"}, "neither 'documents', as Cohere has them, nor 'texts'"),
        ("/rerank", {"query": "a", "texts": ["b"], "return_text": 1}, "'return_text' is 1"),
        ("/rerank", {"query": "a", "documents": "b"}, "'documents' must be a list"),
        ("/score", {"text_1": "a"}, "must have 'text_1' and 'text_2'"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "'text_1' has 2 texts, but 'text_2' has 1"),
    ],
)
def test_wrong_bodies(server: ServerProcess, path: str, body: Any, message: str) -> None:
    status, error = post(server, path, body)
    assert status in (400, 422)
    assert message in json.dumps(error, ensure_ascii=False)


def test_one_command_serves_a_directory(transport: str, folder: Path, vectors: Array, tmp_path: Path) -> None:
    """As repositories of Hugging Face have it: the pooling is in a file beside the encoder."""
    place = tmp_path / "My-Encoder"
    for name, source in (("tokenizer.json", "tokenizer.json"), ("onnx/model.onnx", "tokens.onnx")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes((folder / source).read_bytes())
    (place / "1_Pooling").mkdir()
    (place / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}'
    )
    with running("--embeddings", place, "--http-port", "0", transport=transport) as server:
        np.testing.assert_allclose(post(server, "/embed", {"inputs": TEXTS}), vectors, atol=1e-5)
        assert post(server, "/v1/embeddings", {"input": "a"})["model"] == "My-Encoder"
        info = post(server, "/info", None)
        assert (info["model_id"], info["model_type"]) == ("My-Encoder", {"embedding": {}})
        assert info["max_client_batch_size"] == 2048
