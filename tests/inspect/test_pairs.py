"""`postnorm inspect` of steps of pairs: what stands in the segments, and of which documents."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig, ObjectiveKind
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import TrainConfig
from pipeline.data.counts import sequences_at
from pipeline.data.format import CLS_ID, SEP_ID, DatasetIndex
from pipeline.data.reader import BlockReader
from pipeline.data.run_order import StageData
from pipeline.inspect.run import OpenedRun, step_text
from pipeline.objectives.inputs import train_inputs


def _run(dataset: DatasetIndex, folder: Path, kind: ObjectiveKind) -> OpenedRun:
    config = PretrainConfig(run_dir=str(folder), model=ModelConfig(pooler=True),
                            objective=ObjectiveConfig(kind=kind),
                            data=DataConfig(dir=str(dataset.folder), seq_len=64),
                            train=TrainConfig(global_batch=16, micro_batch=8))  # fmt: skip
    counts = sequences_at(dataset, config.batches.seq_lens, None, config.objective)
    inputs = train_inputs(config.train_data, dataset)
    stages = [StageData(dataset, config.train_data, inputs, counts)]
    given = config.train_data, 10, (), dataset, config.timeline, stages, []
    return OpenedRun(folder, *given, world_size=1)


@pytest.mark.parametrize("kind", ["mlm_nsp", "mlm_sop"])
def test_parts_are_the_tokens(dataset: DatasetIndex, tmp_path: Path, kind: ObjectiveKind) -> None:
    reader, documents = BlockReader(dataset), {}
    for row in range(len(dataset.blocks)):
        block = reader.block(row)
        parts = np.split(block.tokens, block.doc_ends[:-1])
        documents |= dict(zip(block.document_ids, parts, strict=True))
    run = _run(dataset, tmp_path, kind)
    place = run.batch_of_step(3)
    labels, others = [], []
    lines = [json.loads(line) for line in step_text(run, place, None, None, as_json=True)]
    text = "\n".join(step_text(run, place, None, None, as_json=False))
    for line in lines:
        ids = np.array(line["input_ids"])
        ids[line["masked"]] = line["targets"]
        for piece in line["pieces"]:
            expected = [[CLS_ID], []]
            for part in piece["parts"]:
                of_document = documents[part["document_id"]]
                tokens = of_document[part["first_token"] : part["stop_token"]].tolist()
                expected[part["segment"]] += tokens
                others.append(part["document_id"] != piece["document_id"])
            second = [*expected[1], SEP_ID] if piece["label"] is not None else []
            assert ids[slice(*piece["slots"])].tolist() == [*expected[0], SEP_ID, *second]
            labels.append(piece["label"])
            assert f"label {piece['label']}: the second" in text or piece["label"] is None
    assert {0, 1} <= set(labels)
    assert sum(others) == (labels.count(1) if kind == "mlm_nsp" else 0)
    assert text.count("; segment 1 document ") == sum(others)
