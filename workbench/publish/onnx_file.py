"""``net.onnx``: the network in ONNX, in fp32 or in integers of 8 bits, for ONNX Runtime.

Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed_trial.errors import InvalidInput, one_line
from workbench.publish.network import Classifier, Trained, as_text, read_described, without_warnings

INPUT, OUTPUT = "images", "logits"


def save(path: pathlib.Path, trained: Trained) -> None:
    """Write a network for any number of normalised inputs (B, 3, H, W).

    Raises:
        InvalidInput: if torch or ONNX Runtime cannot convert the network.
    """
    import onnx

    program = trained.program()
    try:
        torch.onnx.export(
            program,
            (),
            path,
            input_names=[INPUT],
            output_names=[OUTPUT],
            external_data=False,
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        what = f"torch.onnx cannot write {trained.description['net']['name']} ({one_line(error)[:300]})"
        raise InvalidInput(f"--format: onnx: {what}; use hf") from error
    if trained.calibration is not None:
        _quantize(path, trained)
    model = onnx.load(path)
    onnx.helper.set_model_props(model, as_text(trained.description))
    onnx.save(model, path)


def _quantize(path: pathlib.Path, trained: Trained) -> None:
    """Convert weights to int8 and activations to uint8, scaled by calibration images.

    Weights use 7 bits: AVX2, and AVX-512 without VNNI, add two products in 16 bits. Products of 8-bit weights
    would overflow.
    """
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    assert trained.calibration is not None
    batches = iter(trained.calibration)

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, Any] | None:
            batch = next(batches, None)
            return None if batch is None else {INPUT: batch.numpy()}

    try:
        with without_warnings(), tempfile.TemporaryDirectory() as folder:
            prepared = pathlib.Path(folder, "net.onnx")
            quant_pre_process(path, prepared, skip_symbolic_shape=True)
            quantization.quantize_static(
                prepared,
                path,
                Reader(),
                per_channel=True,
                reduce_range=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
            )
    except OSError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no common class
        what = f"ONNX Runtime cannot quantize {trained.description['net']['name']}"
        raise InvalidInput(f"--int8: {what} ({one_line(error)[:300]}); remove --int8") from error


def read(path: pathlib.Path) -> Classifier:
    """Read a file that ``save`` wrote; ONNX Runtime runs it on the CPU, with torch's number of threads.

    Raises:
        InvalidInput: if the file or its description is missing or damaged, or describes another network.
    """
    import onnxruntime

    description = read_described(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        _refuse_other_files(path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (given,), (scores,) = session.get_inputs(), session.get_outputs()
        seen = description["input"]
        wanted = [3, seen["height"], seen["width"]], [len(description["classes"])]
        if (given.shape[1:], scores.shape[1:]) != wanted:
            raise ValueError(f"its input has the shape {given.shape}, its output {scores.shape}")
        tried = session.run(None, {given.name: np.zeros((2, *wanted[0]), np.float32)})[0]
        if (tried.shape, tried.dtype) != ((2, *wanted[1]), np.float32):
            raise ValueError(f"for 2 images its output is {tried.dtype} of shape {tried.shape}")
    except Exception as error:  # ONNX Runtime's exceptions have no common class
        what = f"is not the classifier that its JSON file describes ({one_line(error)[:300]})"
        raise InvalidInput(f"{path}: {what}; export the network again") from error

    def classify(inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {given.name: inputs.contiguous().numpy()})[0])

    return Classifier(description, classify)


def _refuse_other_files(path: pathlib.Path) -> None:
    """Raise ``ValueError`` if an ONNX network has weights in other files; ``save`` writes none."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    nodes = (node for function in model.functions for node in function.node)
    if any(map(onnx.external_data_helper.uses_external_data, [*_tensors(model.graph), *_constants(nodes)])):
        raise ValueError("weights are in other files")


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield the tensors of an ONNX graph and of its subgraphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _constants(graph.node)


def _constants(nodes: Iterable[Any]) -> Iterator[Any]:
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            yield from _tensors(inner)
