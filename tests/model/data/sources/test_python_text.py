"""The built-in text: the language reference and the source code of the running Python."""

import sysconfig
from pathlib import Path

import pytest

from logitd.model.data.errors import DataError
from logitd.model.data.sources.python_text import python_text


def test_built_in_text_is_the_reference_and_the_sources() -> None:
    text = python_text(Path(sysconfig.get_path("stdlib")))
    documents = {document.name: document for document in text.documents}
    assert {"topics/with", "argparse.py", "json/decoder.py"} <= documents.keys()
    assert not any(name.startswith(("test/", "idlelib/", "site-packages/")) for name in documents)
    assert 5e6 < sum(document.count_bytes() for document in documents.values()) < 2e7
    assert all(document.drawn_by_name for document in documents.values())
    assert text.built_in
    assert text.licence.startswith("PSF-2.0")
    assert "context manager" in "".join(documents["topics/with"].pieces())


def test_python_without_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\n")
    (tmp_path / "_sysconfigdata__linux.py").write_text("PREFIX = '/somewhere'\n")
    assert [document.name for document in python_text(tmp_path).documents] == ["module.py"]
    (tmp_path / "module.py").unlink()
    with pytest.raises(DataError, match="has no Python sources"):
        python_text(tmp_path)
