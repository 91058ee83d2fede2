"""Train the demo model: a small classifier of 8x8 handwritten digits, as ONNX.

Needs:  pip install scikit-learn onnx onnxruntime numpy
Run:    python train.py            train, write digits.onnx and heldout.npz
        python train.py --choose   only repeat the choice of hyper-parameters

The data are the 1797 images that ship inside scikit-learn (nothing is downloaded).
360 of them, a fixed stratified draw, are held out: they are written to heldout.npz
and only ever used to measure the exported model. The hyper-parameters below were chosen
by 5-fold cross validation on the other 1437 images (--choose; tens of minutes), with
the shifted copies made inside each fold, from that fold's training images only.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

import argparse
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.neural_network import MLPClassifier

Images = npt.NDArray[np.uint8]  # [N, 8, 8], values 0..16
Labels = npt.NDArray[np.int64]  # [N]

HELD_OUT, SPLIT_SEED, FOLD_SEED, MODEL_SEED, EPOCHS = 360, 20, 0, 1, 60
Shifts = list[tuple[int, int]]  # down, right
SHIFTS_4: Shifts = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
SHIFTS_8: Shifts = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]


class Settings(NamedTuple):
    """What cross validation chooses between."""

    hidden: tuple[int, ...]
    alpha: float  # L2 penalty
    shifts: Shifts


CHOSEN = Settings((256, 96), 1e-2, SHIFTS_4)
HIDDEN: list[tuple[int, ...]] = [(64,), (128,), (256,), (128, 64), (256, 64), (256, 96)]
GRID = [Settings(h, a, s) for h in HIDDEN for a in (1e-3, 1e-2, 1e-1) for s in (SHIFTS_4, SHIFTS_8)]


def split() -> tuple[Images, Images, Labels, Labels]:
    """Training images, held-out images, training labels, held-out labels."""
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.int64)
    train_x, held_x, train_y, held_y = train_test_split(
        images, labels, test_size=HELD_OUT, stratify=labels, random_state=SPLIT_SEED
    )
    return train_x, held_x, train_y, held_y


def pixels(images: Images) -> npt.NDArray[np.float64]:
    return images.reshape(len(images), 64) / 16.0


def fit(settings: Settings, images: Images, labels: Labels) -> Any:
    """Train on the images and their copies shifted by one pixel."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    copies = [padded[:, 1 - y : 9 - y, 1 - x : 9 - x] for y, x in settings.shifts]
    # n_iter_no_change: always the same number of epochs, no early stop.
    model = MLPClassifier(
        settings.hidden,
        alpha=settings.alpha,
        batch_size=64,
        max_iter=EPOCHS,
        n_iter_no_change=EPOCHS,
        random_state=MODEL_SEED,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(pixels(np.concatenate(copies)), np.tile(labels, len(copies)))
    return model


def choose(images: Images, labels: Labels) -> None:
    """Print the cross-validated accuracy of every settings in GRID, then the best."""
    folds = list(StratifiedKFold(5, shuffle=True, random_state=FOLD_SEED).split(images, labels))
    scores: list[int] = []
    for s in GRID:
        right = 0
        for train, test in folds:
            guess = fit(s, images[train], labels[train]).predict(pixels(images[test]))
            right += int((guess == labels[test]).sum())
        scores.append(right)
        what = f"hidden={s.hidden} alpha={s.alpha:g} copies={len(s.shifts)}"
        print(f"{what}: {right} of {len(images)}", flush=True)
    best = GRID[int(np.argmax(scores))]
    print(f"best: hidden={best.hidden} alpha={best.alpha:g} copies={len(best.shifts)}")


def export(model: Any) -> onnx.ModelProto:
    """The trained network as an ONNX graph that takes the raw uint8 images."""
    weights = {"sixteenth": np.array(1 / 16, np.float32)}
    nodes = [
        helper.make_node("Cast", ["image"], ["cast"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["cast", "sixteenth"], ["scaled"]),
        helper.make_node("Flatten", ["scaled"], ["x0"], axis=1),
    ]
    last = len(model.coefs_)
    for i, (w, b) in enumerate(zip(model.coefs_, model.intercepts_, strict=True), 1):
        weights[f"w{i}"], weights[f"b{i}"] = w.astype(np.float32), b.astype(np.float32)
        out = "logits" if i == last else f"h{i}"
        nodes.append(helper.make_node("Gemm", [f"x{i - 1}", f"w{i}", f"b{i}"], [out]))
        if i < last:
            nodes.append(helper.make_node("Relu", [out], [f"x{i}"]))
    nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
    nodes.append(helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "digits",
        [info("image", TensorProto.UINT8, ["batch", 8, 8])],
        [
            info("label", TensorProto.INT64, ["batch"]),
            info("probabilities", TensorProto.FLOAT, ["batch", 10]),
        ],
        [numpy_helper.from_array(w, name) for name, w in weights.items()],
        doc_string="image: 8x8 digits, pixel values 0 (paper) to 16 (ink).",
    )
    proto = helper.make_model(
        graph,
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17)],
        producer_name="tensorferry examples/digits/train.py",
        doc_string="Classifies 8x8 images of handwritten digits, 0 to 9.",
    )
    source = "UCI Optical Recognition of Handwritten Digits (Alpaydin, Kaynak, 1998)"
    helper.set_model_props(proto, {"data": source, "data_license": "CC BY 4.0"})
    onnx.checker.check_model(proto, full_check=True)
    return proto


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Train the digits demo model.")
    parser.add_argument("--choose", action="store_true", help="only cross-validate")
    parser.add_argument("--out", type=Path, default=here, help="folder to write to")
    args = parser.parse_args()
    train_x, held_x, train_y, held_y = split()
    if args.choose:
        choose(train_x, train_y)
        return
    proto = export(fit(CHOSEN, train_x, train_y))
    onnx.save(proto, args.out / "digits.onnx")
    np.savez_compressed(args.out / "heldout.npz", images=held_x, labels=held_y)
    session = ort.InferenceSession(args.out / "digits.onnx", providers=["CPUExecutionProvider"])
    (guess,) = session.run(["label"], {"image": held_x})
    right = int((guess == held_y).sum())
    print(f"held-out: {right} of {len(held_y)} right ({right / len(held_y):.2%})")


if __name__ == "__main__":
    main()
