"""Objects of CPU kernels: what the cache knows one by, and which count as compiled."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler import cached_kernels, objects
from tapeout.compiler.cache import Cache, key_of
from tapeout.compiler.cached_kernels import made_once


def test_an_object_is_keyed_by_everything_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, processor and each of its features, our lowering, the bindings: one of them changed is another object."""
    keys = [objects.object_key("text", "x86-64-v3")]
    keys += [objects.object_key("text ", "x86-64-v3"), objects.object_key("text", "native")]
    processor, version = objects.processor, importlib.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(objects, "processor", lambda cpu: processor(cpu) + ",avx512f")
        keys.append(objects.object_key("text", "x86-64-v3"))
    with monkeypatch.context() as patch:
        patch.setattr(objects, "lowering_fingerprint", lambda: "f" * 64)
        keys.append(objects.object_key("text", "x86-64-v3"))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: version(name) + ".1")
        keys.append(objects.object_key("text", "x86-64-v3"))
    assert len(set(keys)) == len(keys) and objects.object_key("text", "x86-64-v3") == keys[0]
    assert processor("x86-64-v3").startswith("x86-64-v3:") and "avx2" in processor("x86-64-v3")


def test_only_what_was_made_here_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three kernels one is in the cache, one is made meanwhile by another process, one here."""

    def answered(function: Any, tasks: Any, jobs: int, done: Any) -> None:
        assert list(tasks) == ["here", "elsewhere"]
        store.get_or_make(key_of("b"), lambda: b"B")
        done("elsewhere", made_once(store, key_of("b"), lambda: b"never"))
        done("here", made_once(store, key_of("c"), lambda: b"C"))

    store, told = Cache(tmp_path), list[str]()
    store.get_or_make(key_of("a"), lambda: b"A")
    monkeypatch.setattr(cached_kernels, "in_processes", answered)
    keys = {"known": key_of("a"), "elsewhere": key_of("b"), "here": key_of("c")}
    tasks = dict.fromkeys(("here", "known", "elsewhere"), ())
    found = cached_kernels.cached_kernels(made_once, tasks, keys, store, 1, told.append, ValueError)
    assert found == ({"known": b"A", "elsewhere": b"B", "here": b"C"}, 1) and list(found[0]) == list(keys)
    assert told == ["known", "elsewhere", "here"]
