"""Train a model of rents from the columns of a table, and export it with one input for each column.

Needs scikit-learn, skl2onnx and pandas. The table is made up; its rents follow a formula with noise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from skl2onnx import convert_sklearn
from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

HERE = Path(__file__).resolve().parent
PRICES = {"centre": 21.0, "harbour": 17.0, "hills": 14.0, "station": 12.0}


def table(rows: int, seed: int) -> pd.DataFrame:
    """Return flats with their rents."""
    generator = np.random.default_rng(seed)
    flats = pd.DataFrame(
        {
            "area": generator.uniform(20, 140, rows).round(1),
            "rooms": generator.integers(1, 6, rows),
            "district": generator.choice(list(PRICES), rows),
            "lift": generator.choice(["yes", "no"], rows),
        }
    )
    base = flats["area"] * flats["district"].map(PRICES) * np.where(flats["lift"] == "yes", 1.05, 1)
    return flats.assign(rent=(base + 40 * flats["rooms"] + generator.normal(0, 30, rows)).round())


def main() -> None:
    """Write the model, and a table of flats that it was not trained on."""
    flats, heldout = table(2000, seed=1), table(20, seed=2)
    columns = ColumnTransformer(
        [("words", OneHotEncoder(handle_unknown="ignore"), ["district", "lift"])], remainder="passthrough"
    )
    model = make_pipeline(columns, GradientBoostingRegressor(n_estimators=60, random_state=1))
    model.fit(flats.drop(columns="rent"), flats["rent"])
    inputs = [
        ("area", FloatTensorType([None, 1])),
        ("rooms", Int64TensorType([None, 1])),
        ("district", StringTensorType([None, 1])),
        ("lift", StringTensorType([None, 1])),
    ]
    exported = convert_sklearn(
        model,
        initial_types=inputs,
        final_types=[("rent", FloatTensorType([None, 1]))],
        target_opset={"": 17, "ai.onnx.ml": 3},
    )
    (HERE / "rents.onnx").write_bytes(exported.SerializeToString())
    heldout.to_csv(HERE / "flats.csv", index=False)
    error = (model.predict(heldout.drop(columns="rent")) - heldout["rent"]).abs().mean()
    print(f"{exported.ByteSize()} bytes; mean error of {len(heldout)} flats: {error:.0f}")


if __name__ == "__main__":
    main()
