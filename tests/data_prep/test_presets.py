"""Presets on texts of their kinds, what counts as prose, and own rules."""

import random
import sys
from pathlib import Path

import pytest

from data_prep import corpus, ingest
from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig, FiltersConfig, LanguageConfig, PrepConfig
from data_prep.documents import ReadStats, read_piece
from data_prep.filters.rules import Chain, Dropped, Filters, Kept, key_parts, prose
from data_prep.plugins import OwnDocument, OwnRule, located, source_of
from data_prep.types import Document, Rejected
from pipeline.config.load import load
from pipeline.errors import ConfigError, DataError
from tests.support.prepare import write_texts

FOLDER = Path(__file__).parents[2] / "configs" / "filters"
PRESETS = ("web", "technical", "legal", "verse")
SPAM = (
    "Buy cheap watches online! " * 40,
    "专业代开发票，价格优惠，欢迎来电咨询。" * 30,
    "Home\nAbout us\nContact us today\nPrivacy policy\nTerms of service\n" * 10,
    "首页\n关于我们\n联系我们\n产品中心\n新闻动态\n人才招聘\n在线留言\n" * 8,
    "We use cookies to improve the site and to be of use. Accept all of them.\n" * 12,
    "Great watches and how to buy them.\n```\n" + "Buy the watches online now!\n" * 40 + "```",
    "Great watches and how to buy them.\n" + "| Buy the watches | online now |\n" * 40,
)  # fmt: skip
KINDS = {
    kind: [
        text
        for file in sorted((Path(__file__).parent / "kinds").glob(f"{kind}*"))
        for text in file.read_text(encoding="utf-8").split("####\n")
    ]
    for kind in ("technical", "legal", "verse")
}


def preset(name: str) -> Filters:
    return Filters(load(FiltersConfig, FOLDER / f"{name}.yaml").config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_preset_keeps_texts_of_its_kind(kind: str) -> None:
    texts = [normalise(text) for text in KINDS[kind]]
    assert [o for o in [preset(kind).apply(text) for text in texts] if isinstance(o, Dropped)] == []
    assert len(texts) >= 3
    by_web = [isinstance(preset("web").apply(text), Dropped) for text in texts]
    assert any(by_web), "these texts are what the preset is for"


@pytest.mark.parametrize("name", PRESETS)
def test_a_text_without_prose_is_not_judged_by_a_script_that_it_has_not(name: str) -> None:
    lines = [
        f"| 第{n}条 | 当事人应当按照约定履行第{n * n}项义务，在{n}日内的除外。 |\n"
        for n in range(30)
    ]
    table = "| 条款 | 内容的说明 |\n|---|---|\n" + "".join(lines)
    script = (
        "```bash\nset -e\nfor the_file in *.txt; do\n  wc -l of $the_file and that\ndone\n```\n"
    )
    reasons = [
        getattr(preset(name).apply(normalise(each)), "reason", "") for each in (table, script)
    ]
    assert not any("script" in reason or "stop words" in reason for reason in reasons)
    russian = preset(name).apply("Мой дядя самых честных правил, когда не в шутку занемог. " * 20)
    assert isinstance(russian, Dropped)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_rejects_spam_and_boilerplate(name: str) -> None:
    filters = preset(name)
    assert [text[:30] for text in SPAM if isinstance(filters.apply(normalise(text)), Kept)] == []


@pytest.mark.parametrize("text", [
    "- a dash begins a line of the text that is its only one",
    "the text that trails off and has only one line of it ...",
])  # fmt: skip
def test_one_line_is_not_a_list(text: str) -> None:
    config = load(FiltersConfig, FOLDER / "web.yaml",
                  ["quality.min_words=5", "repetition.enabled=false"]).config  # fmt: skip
    assert isinstance(Filters(config).apply(text), Kept)
    assert isinstance(Filters(config).apply("\n".join([text] * 3)), Dropped)


def test_prose_is_what_is_left_and_shares_are_of_the_whole_text() -> None:
    text = "\n".join([
        "# A title", "", "Some words.", "~~~~", "code()", "~~~", "still code", "~~~~", "- ```py",
        "x = 1", "```", "a | b", "--|--", "1 | one", "", "| c |", "-----", "{}", "[ref]: there",
        "Home | About", "桥", "12 3",
    ])  # fmt: skip
    kept, code = prose(text)
    assert kept.split("\n") == ["# A title", "", "Some words.", "", "Home | About", "桥"]
    assert code == ["code()", "still code", "- ```py", "x = 1", "a | b", "1 | one", "| c |",
                    "[ref]: there"]  # fmt: skip
    for whole in ("Some words.\n\nMore of them.", "", "a ``` b"):
        assert prose(whole)[0] is whole
    opened = "Words before.\n```\nno end of it"
    assert prose(opened)[0] == "Words before.\nno end of it", "a fence without an end hides nothing"
    # Half of the prose is repeated, which is a tenth of the lines.
    code = "\n".join(f"call_{i}(argument);" for i in range(16))
    words = "Output of it:\nwords and more words here\nOutput of it:\nand other words"
    text = f"{words}\n```\n{code}\n```"
    config = load(FiltersConfig, FOLDER / "technical.yaml").config
    values = {check[0]: check[1] for check in Filters(config).measure(text)}
    assert values["repetition: duplicate lines"] == pytest.approx(1 / 22)
    chars = len("".join(text.split()))
    share = len("Output of it:") / len(words.replace("\n", ""))
    of_all = len("".join(words.split())) / chars
    assert values["repetition: duplicate line characters"] == pytest.approx(share * of_all)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_measured_says_what_is_rejected(name: str) -> None:
    """The first measured value beyond its limit is the reason, and no other text is rejected."""
    filters, rng = preset(name), random.Random(5)
    parts = [*SPAM, *(text for texts in KINDS.values() for text in texts)]
    rejected = 0
    for _ in range(60):
        text = "\n".join(
            part[: rng.randint(5, 900)] for part in rng.sample(parts, rng.randint(1, 3))
        )
        beyond = [
            reason
            for reason, value, limit, is_lowest in filters.measure(text)
            if limit is not None and (value < limit if is_lowest else value > limit)
        ]
        outcome = filters.apply(text)
        assert [outcome.reason] == beyond[:1] if isinstance(outcome, Dropped) else not beyond
        rejected += bool(beyond)
    assert rejected > 5


OWN = """
def no_sudo(document):
    if "sudo" in document.text:
        return f"{document.source} has sudo"

def fails(document):
    return document.nothing

def true(document):
    return True
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_rules.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n\ndef rule(document): ...\n")
    (tmp_path / "wrong.py").write_text("def rule(document) ...\n")
    for name in ("manuals", "pages"):
        write_texts(tmp_path / f"{name}.jsonl", [f"sudo is a word {i}" for i in range(3)])
    (tmp_path / "prep.yaml").write_text(f"""
output_dir: {tmp_path}/data
sources:
  - {{name: pages, inputs: [{tmp_path}/pages.jsonl]}}
  - name: manuals
    inputs: [{tmp_path}/manuals.jsonl]
    filters: [{{from: technical, quality: {{enabled: false}}}}, {{python: "own_rules:no_sudo"}}]
filters: {{from: web}}
""")
    return tmp_path


def read(folder: Path, *overrides: str) -> PrepConfig:
    return located(load(PrepConfig, folder / "prep.yaml", overrides).config, folder)


def test_each_source_has_its_own_rules(folder: Path) -> None:
    config = read(folder)
    pages, manuals = (config.filters_of(source) for source in config.sources)
    assert [rules.reads for rules in pages] == ["text"]
    assert [rules.reads for rules in manuals] == ["prose", "text"]
    assert (manuals[0].quality.enabled, manuals[0].quality.min_words) == (False, 30)
    tasks = ingest.tasks(corpus.find(config).pieces, config, folder / "out")
    for task in tasks:
        task.folder.mkdir(exist_ok=True)
    rejected = [ingest.run(task)[0]["filter"]["rejected"] for task in tasks]
    assert list(rejected[0]) == ["quality: few words"]
    assert list(rejected[1]) == ["no_sudo: manuals has sudo"]


def test_a_change_of_rules_repeats_the_tasks_of_their_source(folder: Path) -> None:
    def keys(*overrides: str) -> list[str]:
        config = read(folder, *overrides)
        return [task.key for task in ingest.tasks(corpus.find(config).pieces, config, folder)]

    pages, manuals = keys()
    assert keys("sources.1.filters.0.quality.min_words=4")[0] == pages
    assert keys("sources.1.filters.0.quality.min_words=4")[1] != manuals
    assert keys("filters.quality.min_words=4")[1] == manuals
    (folder / "own_rules.py").write_text(OWN.replace('"sudo"', '"su"'))
    assert keys()[0] == pages
    assert keys()[1] != manuals, "the source of an own rule is part of the key"
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "own_rules.py").rename(elsewhere / "own_rules.py")
    rules = FiltersConfig(python=f"{elsewhere}/own_rules.py:no_sudo")
    (folder / "own_rules.py").write_text(OWN.replace('"sudo"', '"su"'))
    assert key_parts(rules) == key_parts(FiltersConfig(python=f"{folder}/own_rules.py:no_sudo"))


def test_own_rules_are_found_or_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = f"{folder}/own_rules.py"
    sets = (FiltersConfig(), FiltersConfig(python=f"{file}:fails"))
    where = r"source 'manuals': filters\.1\.python = .*own_rules\.py:fails' raised AttributeError: "
    with pytest.raises(DataError, match=where + ".* at line 7, for document manuals/3;"):
        Chain(sets, "manuals").apply("text", Document("manuals/3", "text"))
    with pytest.raises(DataError, match=r"True .*document d; .*None"):
        OwnRule(f"{file}:true", "filters.python")(OwnDocument("d", "s", "text", {}))
    assert OwnRule(f"{file}:no_sudo", "k")(OwnDocument("d", "s", "text", {})) is None
    for text, said in {
        "own_rules": "expected MODULE:FUNCTION",
        "no_such_module_here:f": "there is not a Python file 'no_such_module_here'",
        f"{file}:other": "it has no_sudo, fails, true",
        f"{folder}/wrong.py:rule": "is not valid Python",
    }.items():
        with pytest.raises(ConfigError, match=said):
            source_of(text, "filters.python")
    with pytest.raises(ConfigError, match=r"broken\.py .*ModuleNotFoundError"):
        OwnRule(f"{folder}/broken.py:rule", "filters.python")
    monkeypatch.syspath_prepend(str(folder))
    assert source_of("own_rules:no_sudo", "k").file == folder / "own_rules.py"
    assert OwnRule("own_rules:no_sudo", "k")(OwnDocument("d", "s", "sudo", {})) == (
        "no_sudo: s has sudo"
    )


def test_languages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lingua", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"pip install 'postnorm\[language\]'"):
        Filters(FiltersConfig(language=LanguageConfig(enabled=True)))
    with pytest.raises(ConfigError, match="expected codes such as zh, en"):
        LanguageConfig(enabled=True, languages=())


def test_filters_null_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"filters .*None"):
        read(folder, "filters=null")
    text = (folder / "prep.yaml").read_text().replace("technical", "legl")
    (folder / "prep.yaml").write_text(text)
    with pytest.raises(ConfigError, match="did you mean 'legal'"):
        read(folder)


def test_own_readers(folder: Path) -> None:
    (folder / "readers.py").write_text("""
def parts(path):
    yield from open(path).read().split("==")

def named(path):
    yield "first", "text one"
    yield 7

def none(path):
    return None

def told(path):
    yield "k", "text", {"url": "u", "other": 1}
""")
    (folder / "book.xyz").write_text("one==two")
    source = f"{{name: book, inputs: [{folder}/book.xyz], reader: 'readers:parts'}}"

    def documents(source: str) -> list[Document | Rejected]:
        [piece] = corpus.find(read(folder, f"sources=[{source}]", "filters={}")).pieces
        return list(read_piece(piece, CleanConfig(), ReadStats()))

    assert documents(source) == [
        Document("book/book.xyz@0", "one"),
        Document("book/book.xyz@1", "two"),
    ]
    told = source.replace("parts'", "told', metadata: [url]")
    assert documents(told) == [Document("book/k", "text", {"url": "u"})]
    with pytest.raises(DataError, match=r"named' .* 1 of .*book\.xyz: TypeError"):
        documents(source.replace("parts", "named"))
    with pytest.raises(DataError, match=r"none' .* 0 .*not iterable"):
        documents(source.replace("parts", "none"))
    with pytest.raises(ConfigError, match=r"reader .*format"):
        documents(source.replace(", reader:", ", format: txt, reader:"))

    def key() -> str:
        config = read(folder, f"sources=[{source}]", "filters={}")
        [task] = ingest.tasks(corpus.find(config).pieces, config, folder)
        return task.key

    before = key()
    (folder / "readers.py").write_text("def parts(path):\n    yield 'other'\n")
    assert key() != before
