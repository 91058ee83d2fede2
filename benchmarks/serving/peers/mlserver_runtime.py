"""The model inside MLServer."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from serving.peers.settings import Engine


class Runtime(MLModel):
    """Model that answers batches."""

    async def load(self) -> bool:
        """Load the model."""
        self.engine = Engine()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run a batch; MLServer joins the requests and splits the answer."""
        rows = self.engine.run(NumpyCodec.decode_input(payload.inputs[0]))
        output = NumpyCodec.encode_output(self.engine.output.name, rows)
        return InferenceResponse(model_name=self.name, outputs=[output])
