"""Make the models of this folder with the exporters of scikit-learn, LightGBM and XGBoost.

Run by hand, in an environment with scikit-learn, skl2onnx, lightgbm, xgboost and onnxmltools.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import onnxmltools
import xgboost
from onnxmltools.convert.common.data_types import FloatTensorType as ToolsFloat
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.ensemble import GradientBoostingRegressor, IsolationForest, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, OneHotEncoder, StandardScaler
from sklearn.svm import SVC

FEATURES = 4
OPSETS = {"": 17, "ai.onnx.ml": 3}


def main() -> None:
    """Write one file for each model to the given folder, by default this one."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    generator = np.random.default_rng(1)
    x = generator.standard_normal((60, FEATURES)).astype(np.float32)
    classes = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    numbers = x @ np.arange(FEATURES, dtype=np.float32)
    _scikit_learn(folder, x, classes, numbers)
    _boosted(folder, x, classes, numbers)


def _scikit_learn(folder: Path, x: Any, classes: Any, numbers: Any) -> None:
    models = {
        "logistic": make_pipeline(StandardScaler(), LogisticRegression()).fit(x, classes),
        "ridge": make_pipeline(PCA(3), Ridge()).fit(x, numbers),
        "forest": RandomForestClassifier(3, max_depth=3, random_state=1).fit(x, classes),
        "gradient_boosting": GradientBoostingRegressor(n_estimators=3, random_state=1).fit(x, numbers),
        "isolation_forest": IsolationForest(n_estimators=3, max_samples=8, random_state=1).fit(x),
        "k_means": KMeans(3, n_init=1, random_state=1).fit(x),
        "neighbours": KNeighborsClassifier(3).fit(x[:20], classes[:20]),
        "support_vectors": SVC(probability=True).fit(x, classes),
        "naive_bayes": GaussianNB().fit(x, classes),
        "perceptron": make_pipeline(Normalizer(), MLPClassifier((5,), max_iter=20, random_state=1)).fit(
            x, classes
        ),
        "gaussian_process": GaussianProcessRegressor().fit(x[:10], numbers[:10]),
    }
    for name, model in models.items():
        options = {"zipmap": False} if hasattr(model, "predict_proba") else {}
        kinds = [("x", FloatTensorType([None, FEATURES]))]
        _save(
            folder,
            f"sklearn_{name}",
            lambda m=model, k=kinds, o=options: to_onnx(
                m, initial_types=k, options={id(m): o}, target_opset=OPSETS
            ),
        )
    words = np.array([["a", "u"], ["b", "v"], ["c", "u"], ["a", "v"]], dtype=object)
    table = ColumnTransformer([("words", OneHotEncoder(handle_unknown="ignore"), [0, 1])])
    model = make_pipeline(table, LogisticRegression()).fit(words, [0, 1, 0, 1])
    kinds = [("x", StringTensorType([None, 2]))]
    _save(
        folder,
        "sklearn_categories",
        lambda: to_onnx(
            model, initial_types=kinds, options={id(model): {"zipmap": False}}, target_opset=OPSETS
        ),
    )
    texts = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(
        ["red fox", "blue sky", "red sky"], [0, 1, 0]
    )
    kinds = [("x", StringTensorType([None, 1]))]
    _save(
        folder,
        "sklearn_text",
        lambda: to_onnx(
            texts, initial_types=kinds, options={id(texts): {"zipmap": False}}, target_opset=OPSETS
        ),
    )


def _boosted(folder: Path, x: Any, classes: Any, numbers: Any) -> None:
    kinds = [("x", ToolsFloat([None, FEATURES]))]
    small = {"n_estimators": 3, "max_depth": 3}
    quiet = {**small, "verbose": -1, "min_child_samples": 2}
    for name, model in {
        "classifier": lightgbm.LGBMClassifier(**quiet).fit(x, classes),
        "regressor": lightgbm.LGBMRegressor(**quiet).fit(x, numbers),
    }.items():
        _save(
            folder,
            f"lightgbm_{name}",
            lambda m=model: onnxmltools.convert_lightgbm(
                m, initial_types=kinds, target_opset=15, zipmap=False
            ),
        )
    for name, model in {
        "classifier": xgboost.XGBClassifier(**small).fit(x, classes),
        "regressor": xgboost.XGBRegressor(**small).fit(x, numbers),
    }.items():
        _save(
            folder,
            f"xgboost_{name}",
            lambda m=model: onnxmltools.convert_xgboost(m, initial_types=kinds, target_opset=15),
        )


def _save(folder: Path, name: str, make: Any) -> None:
    try:
        made = make()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        return
    (folder / f"{name}.onnx").write_bytes(made.SerializeToString())
    print(f"{name}: {made.ByteSize()} bytes")


if __name__ == "__main__":
    main()
