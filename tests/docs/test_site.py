"""The documentation site builds without a warning, and its links lead somewhere."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.docs.pages import HANG, ROOT

pytestmark = pytest.mark.slow

BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [*BUILD, "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(folder)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        check=False,
        text=True,
        timeout=3 * HANG,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_links_to_files_outside_of_docs_have_their_place(site: pathlib.Path) -> None:
    page = (site / "how-to" / "deployment" / "index.html").read_text()

    assert 'href="../../project/examples/deploy/machinery-worker.service"' in page
    assert (site / "project" / "examples" / "deploy" / "machinery-worker.service").is_file()
    assert 'href="../../tutorial/"' in (site / "project" / "examples" / "index.html").read_text()


def test_api_is_made_from_docstrings(site: pathlib.Path) -> None:
    page = (site / "reference" / "python" / "index.html").read_text()

    for name in ("Server.task", "Server.send_group", "Signature", "MachineryError", "chain"):
        assert f'id="machinery_py.{name}"' in page
    assert "Publish all members in one batch" in page
