"""New, still failing, fixed, known, expired; the digest escapes; the first bad commit is found."""

import html.parser
import re
import subprocess
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.nightly.tree import job, setting, write_tree
from vitrail.cli import main
from vitrail.config.finding import Refused
from vitrail.nightly.bisect import (
    GOOD,
    SEEN,
    UNTOLD,
    brought_with,
    first_bad,
    first_bad_in_list,
    first_bad_of,
    search_of,
)
from vitrail.nightly.digest import html_page, markdown, page
from vitrail.nightly.known import FILE, Issue, read_known
from vitrail.nightly.records import Attempt, Case, JobRecord, Night, load, merge, save
from vitrail.nightly.risk import area, users_of
from vitrail.nightly.run import run_job
from vitrail.nightly.triage import Triage, together, triage

TODAY = date(2026, 12, 1)
ROOT = Path(__file__).parents[2]
TRACE = """Traceback (most recent call last):
  File "/w/tests/ops/test_rope.py", line 3, in {test}
    rotate()
  File "/w/vitrail/ops/rope/naive.py", line {line}, in rotate
    raise {error}
{error}: {said}
"""


def case(test: str, error: str = "", said: str = "it broke", line: int = 7, **more: str) -> Case:
    trace = TRACE.format(test=test, error=error, said=said, line=line) if error else ""
    outcome = "failed" if error else "passed"
    name = f"tests/ops/test_rope.py::{test}"
    return Case(id=name, outcome=outcome, seconds=1, trace=trace, properties=more)


def night(*cases: Case, commit: str = "abc") -> Night:
    bad = any(c.outcome == "failed" for c in cases)
    outcome = "failed" if bad else "passed"
    tried = Attempt(outcome=outcome, why="", seconds=60, code=int(bad), cases=cases, peak_bytes=1)
    record = JobRecord(
        job=job("ops/test_rope.py"), limit_s=240, outcome=outcome, why="", attempts=(tried,)
    )
    return Night(commit=commit, began="2026-12-01T02:00:00", machine="m", jobs=(record,))


def issue(match: str, expires: date = TODAY) -> Issue:
    return Issue(id="i", match=match, owner="me", expires=expires, why="since it rains")


def held(tonight: Night, before: Night | None = None, *issues: Issue) -> Triage:
    return triage(tonight, before, issues, TODAY, Path(__file__).parent)


def test_equal_causes_are_one_group_and_their_tests_are_named():
    tonight = night(
        case("test_a", "KeyError"), case("test_b", "KeyError", line=99), case("test_c", "OSError")
    )
    made = triage(tonight, None, (), TODAY, ROOT)
    assert [(g.title, len(g.sightings)) for g in made.new] == [
        ("KeyError: it broke", 2),
        ("OSError: it broke", 1),
    ]
    assert not made.green
    assert made.new[0].frame == "vitrail/ops/rope/naive.py:rotate"
    assert "modules" in made.new[0].risk


def test_what_one_commit_brought_is_under_it_and_else_what_ends_in_one_function():
    """A wrong rope breaks tests by their numbers alone: no frame says that they have one cause."""
    tonight = night(
        *(case(f"test_{name}", "AssertionError", said=name, line=0) for name in "abc"),
        case("test_d", "KeyError"),
        case("test_e", "OSError"),
        case("test_f", "TypeError"),
    )
    groups = list(held(tonight).new)
    assert len(groups) == 6
    assert [len(some) for _, some in together(groups)] == [6], "all end in rotate"
    apart = [
        *(replace(g, frame=f"tests/ops/test_rope.py:{g.key}") for g in groups[:3]),
        groups[3],
        replace(groups[4], frame="vitrail/ops/norm/naive.py:norm"),
        groups[5],
    ]
    found = together(apart)
    assert [(what, len(some)) for what, some in found] == [
        ("", 1),
        ("", 1),
        ("", 1),
        ("2 in vitrail/ops/rope/naive.py:rotate", 2),
        ("", 1),
    ]
    said = ["0123abc rope", "0123abc rope", "not found: x", "0123abc rope", "", "4567def norm"]
    told = [replace(g, first_bad=s) for g, s in zip(apart, said, strict=True)]
    found = together(told)
    assert [(what, [told.index(g) for g in some]) for what, some in found] == [
        ("3 by commit 0123abc rope", [0, 1, 3]),
        ("", [2]),
        ("", [4]),
        ("", [5]),
    ]
    text = markdown(page(replace(held(tonight), new=tuple(told))))
    assert "6 new" in text, "each is counted, and has its own script"
    under = text.split("### 3 by commit 0123abc rope")[1].split("\n### ")[0]
    assert [g.key in under for g in told] == [True, True, False, True, False, False]
    assert under.count("\n#### ") == 3


def test_new_still_fixed_and_not_run_again():
    before = night(
        case("test_a", "KeyError"), case("test_b", "OSError"), case("test_gone", "TypeError")
    )
    tonight = night(
        case("test_a", "KeyError", line=12), case("test_b"), case("test_d", "ValueError")
    )
    made = held(tonight, before)
    assert [g.title for g in made.new] == ["ValueError: it broke"]
    assert [g.title for g in made.still] == ["KeyError: it broke"]
    assert [name.split(" @")[0] for name in made.fixed] == ["crash OSError: it broke"]
    assert [name.split(" @")[0] for name in made.unseen] == ["crash TypeError: it broke"]


def test_a_night_without_failures_is_green():
    assert held(night(case("test_a"))).green


def test_what_is_known_does_not_make_it_red_until_its_day_is_past():
    tonight = night(case("test_a", "KeyError"))
    known = held(tonight, None, issue("crash KeyError.*rope"))
    assert known.green
    assert [g.kind for g in known.known] == ["known"]
    assert known.known[0].cause_kind == "crash"
    late = held(tonight, None, issue("crash KeyError.*rope", date(2026, 11, 30)))
    assert [g.title for g in late.new] == ["KeyError: it broke"]
    assert [i.id for i in late.expired] == ["i"]
    unused = held(night(case("test_a")), None, issue("never", date(2026, 11, 30)))
    assert not unused.green, "an expired issue fails whether it was seen or not"


def test_the_known_issues_that_we_have_are_readable():
    for known in read_known(FILE):
        assert known.expires > date(2026, 1, 1)


@pytest.mark.parametrize(
    ("text", "saw"),
    [
        ("[[issue]]\nid='a'\nmatch='x'\nowner='o'\nwhy='w'", "expires"),
        ("[[issue]]\nid='a'\nmatch='('\nowner='o'\nwhy='w'\nexpires=2026-01-01", "error"),
        ("[[issue]]\nid='a'\nmatch='x'\nowner=''\nwhy='w'\nexpires=2026-01-01", "not empty"),
        ("[[issue]]\nid='a'\nmatch='x'\nowner='o'\nwhy='w'\nexpires='soon'", "expires"),
        ("[[issue]]\nid='a'\nmatch='x'\nowner='o'\nwhy='w'\nexpires=2026-01-01\nx=1", "x"),
        ("[[issues]]\n", "issues"),
        ("what", "TOML"),
    ],
)
def test_a_file_of_known_issues_is_read_strictly(tmp_path: Path, text: str, saw: str):
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(Refused, match=saw):
        read_known(tmp_path / "known.toml")


def test_results_of_another_kind_or_commit_are_refused(tmp_path: Path):
    path = tmp_path / "results.json"
    save(night(case("test_a")), path)
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    for text in (path.read_text(), "{", "[]"):
        path.write_text(text)
        with pytest.raises(Refused, match="results.json of a night, format 1"):
            load(path)
    with pytest.raises(Refused, match="commits abc, def"):
        merge([night(commit="abc"), night(commit="def")])


HOSTILE = "</pre><script>alert(1)</script> ``` \n```\n# Not a heading | <b> @me [x](y) & \"'"


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)

    def handle_data(self, data):
        self.text += data


def hostile_digest(text: str) -> tuple[str, str]:
    tonight = night(
        case(f"test_{text}", "KeyError", said=text, capsule=text, repro=text),
        case("test_b", **{f"figure {text}": text}),
        commit=text,
    )
    known = Issue(id=text, match="never", owner=text, expires=date(2026, 1, 1), why=text)
    blocks = page(held(tonight, night(case(text, "OSError", said=text)), known))
    return html_page(blocks), markdown(blocks)


def test_nothing_that_a_log_says_is_markup():
    made, text = hostile_digest(HOSTILE)
    tags = Tags()
    tags.feed(made)
    assert "script" not in tags.seen
    assert "b" not in tags.seen
    assert "<script>alert(1)</script>" in tags.text, "and it is shown as it was"
    outside = _outside_code(text)
    assert "<" not in outside
    assert "\n# Not a heading" not in outside
    assert "[x](y)" not in outside
    assert "@me" not in outside.replace("\\@me", "")


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=60))
@settings(max_examples=20, deadline=None)
def test_no_text_becomes_a_tag(text: str):
    tags = Tags()
    made = night(case("test_a", "KeyError", said=text, capsule=text), commit=text)
    tags.feed(html_page(page(held(made))))
    assert tags.seen <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li"),
        *("code", "table", "tr", "th", "td", "pre"),
    }


def _outside_code(text: str) -> str:
    """Markdown without its fences and code spans."""
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        ticks = line[: len(line) - len(line.lstrip("`"))]
        if fence:
            fence = "" if line == fence else fence
        elif len(ticks) >= 3:
            fence = ticks
        else:
            while "`" in line.replace("\\`", ""):
                start = line.index("`")
                if line[start - 1 : start] == "\\":
                    line = line[: start - 1] + line[start + 1 :]
                    continue
                run = line[start:][: len(line[start:]) - len(line[start:].lstrip("`"))]
                end = line.index(run, start + len(run))
                line = line[:start] + line[end + len(run) :]
            lines.append(line)
    assert not fence, "a fence is left open"
    return "\n".join(lines)


def test_the_digest_says_all_that_is_asked_of_it():
    before = night(case("test_b", "OSError"))
    tonight = night(case("test_a", "KeyError", capsule="c.json", repro="r.py"), case("test_b"))
    text = markdown(page(triage(tonight, before, (), TODAY, ROOT)))
    for part in (
        *("Night of 2026-12-01: red", "1 new, 0 still failing, 1 fixed", "| faults | 1 | 2 | 1 |"),
        *("cause: `vitrail/ops/rope/naive.py:rotate`", "capsule: `c.json`", "first bad commit"),
        *("one-file repro: `r.py`", "risk of a change there: `", "## Fixed", "owner: `me`"),
        "signature: `crash KeyError: it broke @ vitrail/ops/rope/naive.py:rotate`",
    ):
        assert part in text, part


def test_the_reach_of_a_module_is_everything_that_leans_on_it(tmp_path: Path):
    root = write_tree(
        tmp_path,
        {
            "vitrail/__init__.py": "",
            "vitrail/low/a.py": "",
            "vitrail/mid/b.py": "def f():\n    from vitrail.low import a\n",
            "vitrail/top/c.py": "import vitrail.mid.b\n",
        },
    )
    users = users_of(root)
    found = area("vitrail/low/a.py", users)
    assert found is not None
    assert (found.modules, found.rooms) == (2, ("mid", "top"))
    assert area("vitrail/top/c.py", users) == ("vitrail/top/c.py", 0, ())
    assert area("tests/x.py", users) is None


@given(
    first=st.integers(0, 30),
    count=st.integers(1, 31),
    untold=st.sets(st.integers(0, 30), max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_a_list_is_halved_to_the_first_bad_commit(first: int, count: int, untold: set[int]):
    asked: list[str] = []

    def ask(commit: str) -> int:
        asked.append(commit)
        number = int(commit)
        return UNTOLD if number in untold else SEEN if number >= first else GOOD

    found = first_bad_of([str(i) for i in range(count)], ask)
    assert len(asked) == len(set(asked)) <= 2 + count.bit_length() + len(untold)
    if first >= count or count - 1 in untold:
        assert found is None
    elif first in untold or first - 1 in untold:
        assert found is None, "what cannot be told is not guessed"
    else:
        assert found == str(first)


@pytest.mark.nightly
@pytest.mark.suite("faults", minutes=1, owner="nightly")
def test_git_and_a_list_find_the_commit_that_broke_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    test = "from vitrail.a import f\ndef test_a(): f()\n"
    root = write_tree(tmp_path / "r", {"vitrail/__init__.py": "", "tests/test_a.py": test})
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=n@n"]
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    commits = []
    for i in range(9):
        broken = "raise KeyError('k')" if i >= 5 else "pass"
        (root / "vitrail/a.py").write_text(f"n = {i}\ndef f():\n    {broken}\n")
        if i == 3:  # cannot be told
            (root / "vitrail/a.py").write_text("import no_such_thing\n")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", f"change {i}"], check=True)
        head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
        commits.append(head.strip())
    record = run_job(job("test_a.py"), setting(root, tmp_path / "out"), "x")
    tonight = Night(commit=commits[-1], began="", machine="", jobs=(record,))
    (group,) = triage(tonight, None, (), TODAY, root).new
    search = search_of(group, ())
    assert first_bad(search, root, commits[0], commits[-1]).endswith("change 5")
    assert first_bad_in_list(search, root, commits[3:]).endswith("change 5")
    others = [f"{commits[i]} change {i}" for i in (0, 8, 4, 5, 6)]
    assert brought_with(search, root, others).endswith("change 5")
    assert brought_with(search, root, others[:3]) == ""
    trees = subprocess.check_output([*git, "worktree", "list"], text=True)
    assert len(trees.splitlines()) == 1


MARK = "pytestmark = [pytest.mark.nightly, pytest.mark.suite('faults', minutes=0.1, owner='me')]"
SPREAD = f"""import pytest
from vitrail.a import n
{MARK}
def test_sum(): assert n + 1 == 2
def test_twice(): assert 2 * n == 2, 'twice'
def test_other():
    from vitrail.b import m
    assert m == 1, 'other'
"""


@pytest.mark.nightly
@pytest.mark.suite("faults", minutes=1, owner="nightly")
def test_a_night_of_many_failures_and_two_commits_says_which_brought_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    files = {"vitrail/__init__.py": "", "tests/test_a.py": SPREAD}
    root = write_tree(tmp_path / "r", files)
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=n@n"]
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for i in range(7):
        (root / "vitrail/a.py").write_text(f"n = {1 if i < 2 else 1.5}\n# {i}\n")
        (root / "vitrail/b.py").write_text(f"m = {1 if i < 5 else 2}\n")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", f"change {i}"], check=True)
    where = (f"--root={root}", f"--out={tmp_path / 'night'}", "--no-repro")
    assert main(["nightly", *where, "--bisect=HEAD~6..HEAD", "--", "-p", "no:cacheprovider"]) == 1
    text = (tmp_path / "night" / "digest.md").read_text()
    assert "3 new" in text
    (joined,) = re.findall(r"^### 2 by commit .*$", text, re.M)
    assert joined.endswith("change 2")
    assert len(re.findall(r"^- first bad commit: `[0-9a-f]+ change 5`$", text, re.M)) == 1
