"""The hook that waits for torch, on small modules of its own."""

import importlib
import sys

import pytest

from flash_kda import _torch_hook


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules -> a function that does; they are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before, path = set(sys.modules), list(sys.meta_path)

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]
    assert sys.meta_path == path, "a finder was left behind"


def test_an_imported_module_is_not_waited_for():
    calls = []
    _torch_hook.call_after_import("sys", lambda: calls.append(1))
    assert calls == [1]


def test_a_later_import_is_followed_once(modules):
    modules(hooked_later="x = 1")
    calls = []
    name = "hooked_later"
    _torch_hook.call_after_import(name, lambda: calls.append(name in sys.modules))
    assert calls == []
    importlib.import_module("hooked_later")
    importlib.import_module("hooked_later")
    assert calls == [True]


def test_an_import_under_way_is_waited_for(modules):
    """As when a module that torch imports while it loads imports us."""
    modules(
        hooked_now="import hooks_in\nready = True",
        hooks_in=(
            "import sys\n"
            "from flash_kda import _torch_hook\n"
            "calls = []\n"
            "_torch_hook.call_after_import(\n"
            "    'hooked_now', lambda: calls.append(sys.modules['hooked_now'].ready))\n"
        ),
        imported_next="",
    )
    hooked = importlib.import_module("hooked_now")
    assert hooked.hooks_in.calls == []
    importlib.import_module("imported_next")
    assert hooked.hooks_in.calls == [True]


def test_an_import_that_fails_calls_nothing(modules):
    modules(
        hooked_bad="import hooks_bad\nraise ImportError('half way')",
        hooks_bad=(
            "from flash_kda import _torch_hook\n"
            "calls = []\n"
            "_torch_hook.call_after_import('hooked_bad', lambda: calls.append(1))\n"
        ),
        imported_after="",
    )
    with pytest.raises(ImportError, match="half way"):
        importlib.import_module("hooked_bad")
    importlib.import_module("imported_after")
    assert sys.modules["hooks_bad"].calls == []
