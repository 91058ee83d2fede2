"""Make the models of this folder with the exporters of scikit-learn, LightGBM and XGBoost.

Run by hand, in an environment with scikit-learn, skl2onnx, lightgbm, xgboost and onnxmltools.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import onnxmltools
import xgboost
from onnxmltools.convert.common.data_types import FloatTensorType as ToolsFloat
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn import cluster, ensemble, linear_model, naive_bayes, neighbors, neural_network, svm
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, OneHotEncoder, StandardScaler

FEATURES = 4
OPSETS = {"": 17, "ai.onnx.ml": 3}


def main() -> None:
    """Write one file for each model to the given folder, by default this one."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    x = np.random.default_rng(1).standard_normal((60, FEATURES)).astype(np.float32)
    classes = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    numbers = x @ np.arange(FEATURES, dtype=np.float32)
    for name, make in (*_scikit_learn(x, classes, numbers), *_boosted(x, classes, numbers)):
        try:
            made = make()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        (folder / f"{name}.onnx").write_bytes(made.SerializeToString())
        print(f"{name}: {made.ByteSize()} bytes")


def _scikit_learn(x: Any, classes: Any, numbers: Any) -> Iterator[tuple[str, Any]]:
    perceptron = neural_network.MLPClassifier((5,), max_iter=20, random_state=1)
    regressor = ensemble.GradientBoostingRegressor(n_estimators=3, random_state=1)
    forest = ensemble.IsolationForest(n_estimators=3, max_samples=8, random_state=1)
    words = np.array([["a", "u"], ["b", "v"], ["c", "u"], ["a", "v"]], dtype=object)
    columns = ColumnTransformer([("words", OneHotEncoder(handle_unknown="ignore"), [0, 1])])
    texts = ["red fox", "blue sky", "red sky"]
    models = {
        "logistic": make_pipeline(StandardScaler(), linear_model.LogisticRegression()).fit(x, classes),
        "ridge": make_pipeline(PCA(3), linear_model.Ridge()).fit(x, numbers),
        "forest": ensemble.RandomForestClassifier(3, max_depth=3, random_state=1).fit(x, classes),
        "gradient_boosting": regressor.fit(x, numbers),
        "isolation_forest": forest.fit(x),
        "k_means": cluster.KMeans(3, n_init=1, random_state=1).fit(x),
        "neighbours": neighbors.KNeighborsClassifier(3).fit(x[:20], classes[:20]),
        "support_vectors": svm.SVC(probability=True).fit(x, classes),
        "naive_bayes": naive_bayes.GaussianNB().fit(x, classes),
        "perceptron": make_pipeline(Normalizer(), perceptron).fit(x, classes),
        "gaussian_process": GaussianProcessRegressor().fit(x[:10], numbers[:10]),
        "categories": make_pipeline(columns, linear_model.LogisticRegression()).fit(words, [0, 1, 0, 1]),
        "text": make_pipeline(TfidfVectorizer(), linear_model.LogisticRegression()).fit(texts, [0, 1, 0]),
    }
    kinds = {"categories": StringTensorType([None, 2]), "text": StringTensorType([None, 1])}
    for name, model in models.items():
        given = [("x", kinds.get(name, FloatTensorType([None, FEATURES])))]
        options = {"zipmap": False} if hasattr(model, "predict_proba") else {}
        yield (
            f"sklearn_{name}",
            partial(to_onnx, model, initial_types=given, options={id(model): options}, target_opset=OPSETS),
        )


def _boosted(x: Any, classes: Any, numbers: Any) -> Iterator[tuple[str, Any]]:
    small: dict[str, Any] = {"n_estimators": 3, "max_depth": 3}
    quiet = {**small, "verbose": -1, "min_child_samples": 2}
    options: dict[str, Any] = {"initial_types": [("x", ToolsFloat([None, FEATURES]))], "target_opset": 15}
    light, extreme = onnxmltools.convert_lightgbm, onnxmltools.convert_xgboost
    light_classes = lightgbm.LGBMClassifier(**quiet).fit(x, classes)
    yield "lightgbm_classifier", partial(light, light_classes, zipmap=False, **options)
    light_numbers = lightgbm.LGBMRegressor(**quiet).fit(x, numbers)
    yield "lightgbm_regressor", partial(light, light_numbers, zipmap=False, **options)
    yield "xgboost_classifier", partial(extreme, xgboost.XGBClassifier(**small).fit(x, classes), **options)
    yield "xgboost_regressor", partial(extreme, xgboost.XGBRegressor(**small).fit(x, numbers), **options)


if __name__ == "__main__":
    main()
