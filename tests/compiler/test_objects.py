"""Objects of CPU kernels: what the cache knows one by."""

import importlib.metadata

import pytest

from tapeout.compiler import objects


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
