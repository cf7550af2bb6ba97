"""Param, ShapeDtype, and init: the same values on every layout, shards only."""

import math
import pickle

import optree
import pytest
import torch
from helpers import run_ranks

from fsharding import random
from fsharding.annotate import layouts
from fsharding.annotate import param as module
from fsharding.annotate.mesh import make_mesh
from fsharding.annotate.param import Param, ShapeDtype, as_dtype, init
from fsharding.annotate.place import device_get, dims_of
from fsharding.annotate.spec import P, local_slices
from fsharding.errors import ShardingError


def described():
    return {"embed": Param((37, 16), axes=("vocab", "embed")), "norm": Param((16,), init="ones"),
            "bias": Param((5,), init="zeros"), "scale": Param((), init=("constant", 0.5)),
            "w": [Param((8, 6, 10), dtype="bfloat16", axes=("expert", "embed", "mlp"), init=("normal", 0.5)),
                  Param((3, 7), init=("uniform", 0.1)), Param((6, 4), init=random.normal_block)]}


def message(make):
    with pytest.raises(ShardingError) as error:
        make()
    return str(error.value)


def test_values_are_what_init_says():
    got = device_get(init(described(), make_mesh({"a": 1}), seed=3))
    assert torch.equal(got["norm"], torch.ones(16)) and torch.equal(got["bias"], torch.zeros(5))
    assert got["scale"] == 0.5 and got["w"][0].dtype == torch.bfloat16
    assert 0.4 < got["w"][0].float().std() < 0.6 and got["embed"].std() < 0.03
    assert got["w"][1].abs().max() < 0.1 and 0.7 < got["w"][2].std() < 1.4


def test_seed_and_path_decide_and_other_leaves_do_not():
    mesh = make_mesh({"a": 1})
    one = init({"x": Param((4,)), "y": Param((4,))}, mesh)
    two = init({"y": Param((4,)), "z": Param((9, 9))}, mesh)
    assert torch.equal(device_get(one)["y"], device_get(two)["y"])
    assert not torch.equal(device_get(one)["x"], device_get(one)["y"])
    assert not torch.equal(device_get(one)["x"], device_get(init({"x": Param((4,))}, mesh, seed=1))["x"])


def test_every_rank_of_a_fake_mesh_gets_its_slice(monkeypatch):
    tree = described()
    whole = device_get(init(tree, make_mesh({"a": 1}), seed=5))
    mesh = make_mesh({"efsdp": 4, "ep": 2}, fake=True)
    specs = layouts.dp2ep(mesh)(tree)
    place = type(mesh).coordinates
    for rank in range(mesh.size):
        monkeypatch.setattr(type(mesh), "coordinates", lambda self, r=None, rank=rank: place(self, rank))
        mine = init(tree, mesh, specs, seed=5)
        for got, want in zip(optree.tree_leaves(mine), optree.tree_leaves(whole), strict=True):
            cut = local_slices(want.shape, dims_of(got), mesh.shape, place(mesh, rank))
            assert torch.equal(got.to_local(), want[cut])


def test_only_the_shard_is_ever_made(monkeypatch):
    drawn = []
    real = random.normal_block
    monkeypatch.setattr(random, "normal_block", lambda k, g, s, local, *rest: drawn.append(math.prod(local)) or
                        real(k, g, s, local, *rest))
    monkeypatch.setattr(module, "_CHUNK", 64)
    mesh = make_mesh({"a": 64}, fake=True)
    leaf = init(Param((1 << 20, 8)), mesh, P("a"))
    assert leaf.shape == (1 << 20, 8) and sum(drawn) == leaf.to_local().numel() == (1 << 20) * 8 // 64
    assert max(drawn) == 64
    monkeypatch.setattr(module, "_CHUNK", 1 << 22)
    assert torch.equal(init(Param((1 << 20, 8)), mesh, P("a")).to_local(), leaf.to_local())


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Param((2, 3), axes=("a",)), ["1 names", "2 dims"]), (lambda: Param((2,), axes="a"), ["'a'", "per dim"]),
    (lambda: Param((2,), axes=(3,)), ["(3,)"]), (lambda: Param((2,), dtype="bf17"), ["bf17", "torch.bfloat16"]),
    (lambda: Param((2,), init="gauss"), ["gauss", '"normal"', '"zeros"']),
    (lambda: Param((2,), init="uniform"), ["bound"]), (lambda: Param((2,), init=("zeros", 1)), ["zeros"]),
    (lambda: Param((-1,)), ["(-1,)"]), (lambda: Param(3), ["3"]), (lambda: ShapeDtype((2.5,)), ["2.5"]),
    (lambda: as_dtype(3), ["3"])])
def test_bad_descriptions(make, words):
    text = message(make)
    assert all(word in text for word in words), text


def test_descriptions_are_values():
    assert Param([2, 3], "bf16", ("a", None)) == Param((2, 3), torch.bfloat16, ["a", None])
    assert Param((2, 3)).axes == (None, None) and Param(()).ndim == 0
    assert hash(Param((2,))) == hash(Param((2,))) and pickle.loads(pickle.dumps(Param((2,)))) == Param((2,))
    assert ShapeDtype([2], "f16", P("a")) == ShapeDtype((2,), torch.float16, P("a")) and ShapeDtype((2,)).ndim == 1
    assert {as_dtype(name) for name in ("bfloat16", "bf16", torch.bfloat16)} == {torch.bfloat16}


def test_init_names_the_leaf():
    mesh = make_mesh({"a": 2, "tp": 2}, model_axes=("tp",), fake=True)
    assert "layers.w is a Tensor, not a Param" in message(lambda: init({"layers": {"w": torch.ones(2)}}, mesh))
    assert "w" in (text := message(lambda: init({"w": Param((4,))}, mesh, P("b")))) and '"b"' in text
    assert "Dim 0 of w has size 5" in message(lambda: init({"w": Param((5,))}, mesh, P("tp")))
    wrong = Param((4, 2), init=lambda key, shape, starts, local, dtype, device: torch.ones(shape))
    text = message(lambda: init({"w": wrong}, mesh, P("a")))
    assert "The init function of w returned the shape (4, 2)" in text and "(2, 2)" in text


def init_work(rank, world, axes, layout):
    mesh = make_mesh(axes)
    params = init(described(), mesh, getattr(layouts, layout)(mesh)(described()), seed=9)
    return device_get(params)


def test_the_same_values_on_every_layout_and_world_size():
    want = device_get(init(described(), make_mesh({"a": 1}), seed=9))
    for axes, layout in (({"efsdp": 2, "ep": 2}, "dp2ep"), ({"ep": 2, "efsdp": 1}, "legacy_ep"),
                         ({"replicate": 2, "efsdp": 2}, "hsdp"), ({"data": 3}, "fsdp")):
        for got in run_ranks(math.prod(axes.values()), init_work, axes, layout):
            assert all(torch.equal(got[key], want[key]) for key in ("embed", "norm", "bias", "scale"))
            assert all(torch.equal(one, two) for one, two in zip(got["w"], want["w"], strict=True))
