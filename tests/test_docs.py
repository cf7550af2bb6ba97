"""The documentation is run and checked: its code blocks, the names that it mentions, its local links."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsharding as fs

ROOT = Path(__file__).parent.parent
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python[ \t]*(skip)?[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page):
    """(line of the first statement, code) of each block that is to be executed."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(2)), m.group(2)) for m in BLOCK.finditer(text) if m.group(1) is None]


@pytest.mark.parametrize("page", [README, GUIDE, ROOT / "docs" / "inside_shard.md"], ids=name_of)
def test_code_blocks_run(page):
    found = blocks(page)
    assert found, f"{name_of(page)} has no python blocks"
    namespace = {"__name__": "docs"}
    for line, code in found:
        # The empty lines make tracebacks show the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_a_block_marked_skip_is_left_out(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n```python\na = 1\n```\n\n```python skip\na = 2\n```\n```\na = 3\n```\n", encoding="utf-8")
    assert blocks(page) == [(2, "a = 1\n")]


@pytest.mark.parametrize("name", fs.__all__)
def test_public_names_are_documented(name):
    value = getattr(fs, name)
    if inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value):
        doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
        # A dataclass without a docstring gets its signature as one.
        assert doc and doc.strip() and not doc.startswith(f"{name}("), f"fs.{name} has no docstring"
    text = README.read_text(encoding="utf-8") + GUIDE.read_text(encoding="utf-8")
    mention = rf"\bfs\.{name}\b|`{name}\b|^from fsharding import [^\n]*\b{name}\b"
    assert re.search(mention, text, re.MULTILINE), f"neither README.md nor docs/guide.md mentions {name}"


@pytest.mark.parametrize("name", ["layouts", "moe", "optim", "random"])
def test_public_functions_of_modules_have_docstrings(name):
    module = getattr(fs, name)
    for member in module.__all__:
        value = getattr(module, member)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__ and value.__doc__.strip(), f"fs.{name}.{member} has no docstring"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_local_links_lead_to_files(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith(("#", "mailto:")):
            continue
        file = page.parent / target.partition("#")[0]
        assert file.exists(), f"{name_of(page)} links to {target}, which is not there"


def test_the_tables_of_the_page_come_from_the_code():
    script = str(ROOT / "docs" / "generate.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
