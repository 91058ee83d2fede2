"""Models inside MLServer, for test_foreign_servers.py; they run in MLServer's environment."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Double(MLModel):
    """Model that answers y = 2 x."""

    async def load(self) -> bool:
        """Be ready."""
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Double the only input."""
        y = NumpyCodec.encode_output("y", 2 * NumpyCodec.decode_input(payload.inputs[0]))
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[y])
