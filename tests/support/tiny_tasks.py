"""A tiny model with a WordPiece tokenizer, and task files of every kind that it can learn."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from pipeline.config.model import ModelConfig
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.tokenizer.fast import BertOptions
from pipeline.tokenizer.wordpiece import build
from pipeline.use.folder import write_model
from tests.support import bert_vocabulary

PLACES = ["北京", "上海", "南京", "天津"]
NAMES = ["张伟", "王芳", "李娜", "刘洋"]
VERBS = ["去了", "喜欢", "离开", "想念"]
NUM_ROWS = 64


def write_tiny_model(folder: Path) -> Path:
    """Make a model folder: 2 layers of 32, random weights."""
    folder.mkdir()
    words = "good bad fine poor film book red green blue what who where is the a in"
    pieces = bert_vocabulary.rows(
        [f"{''.join(PLACES + NAMES + VERBS)}，。？的谁在哪里 {words} " * 3]
    )
    (folder / "tokenizer.json").write_text(build(pieces, BertOptions(), folder))
    config = ModelConfig(vocab_size=len(pieces), num_layers=2, hidden_size=32, num_heads=2,
                         ffn_size=64, max_positions=64, dropout=0.0, attention_dropout=0.0,
                         init="unit")  # fmt: skip
    torch.manual_seed(3)
    write_model(folder, config, dict(MaskedLanguageModel(config).state_dict()), {})
    return folder


def rows_of(kind: str, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that depend on their text alone, so that a model can learn them all."""
    found = []
    picks = np.random.default_rng(seed).integers(4, size=(NUM_ROWS, 3)).tolist()
    for number, (a, b, c) in enumerate(picks):
        name, verb, place = NAMES[a], VERBS[b], PLACES[c]
        text = f"{name}{verb}{place}"
        spans = [["name", 0, 2], ["place", 4, 6]]
        row: dict[str, Any] = {
            "classify": {"text": text, "label": verb},
            "pair": {"text": text, "text_b": place if number % 2 else "天津",
                     "label": "same" if number % 2 or place == "天津" else "other"},
            "choice": {"text": text, "text_b": "在哪里", "choices": PLACES[: 2 + number % 3],
                       "label": min(PLACES.index(place), 1 + number % 3)},
            "tag": {"text": text, "label": spans},
            "spans": {"text": text, "label": [*spans, ["all", 0, 6]]},
            "qa": {"text": text, "text_b": "谁",
                   "answers": [{"text": name, "answer_start": 0}] if verb != "想念" else []},
            "multilabel": {"text": text, "label": [name, place]},
            "regress": {"text": text, "label": PLACES.index(place) / 2},
            "cloze": {"text": f"{name}#idiom#{place}", "label": number % 3,
                      "choices": [place if c == number % 3 else VERBS[c] for c in range(3)]},
            "rank": {"text": place, "choices": [f"{name}{verb}{c}" for c in PLACES[number % 2:]],
                     "label": [2 * (c == place) for c in PLACES[number % 2:]]},
            "coref": {"text": text, "label": "true" if name in NAMES[:2] else "false",
                      "target": {"span1_text": name, "span1_index": 0,
                                 "span2_text": place, "span2_index": 4}},
        }[kind]  # fmt: skip
        found.append({"id": f"r{number}", **row})
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_task(folder: Path, kind: str, **sections: dict[str, Any]) -> Path:
    """Write a task whose dev and test are its train."""
    write_rows(folder / f"{kind}.jsonl", rows_of(kind))
    files = [f"{kind}.jsonl"]
    kinds = {"pair": ("text", "text_b"), "choice": ("text", "text_b", "choices"),
             "rank": ("text", "choices"), "qa": ("text", "text_b"), "cloze": ("text", "choices"),
             "coref": ("text", "target")}  # fmt: skip
    used = {name: name for name in kinds.get(kind, ("text",))}
    body: dict[str, dict[str, Any]] = {
        "task": {"kind": kind},
        "data": {"train": files, "dev": files, "test": files, "fields": used},
        "input": {"max_length": 32, "stride": 16, "max_question": 8}, "head": {"dropout": 0.0},
        "train": {"epochs": 12, "batch": 8, "lr": 3e-3, "warmup": 0.1},
    }  # fmt: skip
    for name, values in sections.items():
        body[name] = body.get(name, {}) | values
    path = folder / f"my-{kind}.yaml"
    path.write_text(yaml.safe_dump(body, allow_unicode=True))
    return path
