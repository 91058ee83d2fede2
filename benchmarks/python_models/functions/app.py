"""The functions as models of tensorferry: `tensorferry serve app.py`."""

from python_models.functions import empty as _empty
from python_models.functions import tanh as _tanh
from tensorferry.serving import FP32, model

empty = model(inputs={"x": FP32[-1, _empty.WIDTH]}, outputs={"y": FP32[-1, _empty.WIDTH]})(_empty.empty)
tanh = model(inputs={"x": FP32[-1, _tanh.WIDTH]}, outputs={"y": FP32[-1, _tanh.WIDTH]})(_tanh.tanh)
