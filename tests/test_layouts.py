"""Layouts: which spec each rule gives, what it costs a rank, and what cannot be placed."""

import math

import pytest
import torch

from fsharding.annotate import layouts
from fsharding.annotate.layouts import Layout, Rule
from fsharding.annotate.mesh import make_mesh
from fsharding.annotate.param import Param
from fsharding.annotate.spec import P, local_slices, normalize
from fsharding.errors import ShardingError


def moe(experts=8, width=16, hidden=48, vocab=97):
    return {"embed": Param((vocab, width), axes=("vocab", "embed")), "norm": Param((width,), axes=("embed",)),
            "scale": Param(()), "layers": [{
                "router": Param((width, experts), axes=("embed", "experts")),
                "w_in": Param((experts, width, 2 * hidden), axes=("expert", "embed", "mlp")),
                "w_out": Param((experts, hidden, width), axes=("expert", "mlp", "embed")),
                "bias": Param((experts, width), axes=("expert", "embed"))}]}


def mesh_of(**axes):
    return make_mesh(axes, fake=True)


def message(make):
    with pytest.raises(ShardingError) as error:
        make()
    return str(error.value)


def numel_on(rank, param, spec, mesh):
    dims = normalize(spec, param.ndim, mesh.axis_names)
    return math.prod(s.stop - s.start for s in local_slices(param.shape, dims, mesh.shape, mesh.coordinates(rank)))


def test_fsdp_cuts_every_leaf_over_all_data_axes():
    mesh = make_mesh({"replicate": 2, "efsdp": 2, "tp": 3}, model_axes=("tp",), fake=True)
    specs = layouts.fsdp(mesh)(moe())
    both = ("replicate", "efsdp")
    assert specs["embed"] == P(None, both)  # 97 rows do not divide, 16 columns do
    assert specs["norm"] == P(both) and specs["scale"] == P()
    assert specs["layers"][0]["w_in"] == P(both) and specs["layers"][0]["router"] == P(both)
    assert layouts.fsdp(mesh)({"odd": Param((3, 7))}) == {"odd": P(None, both)}  # uneven: the largest


def test_hsdp_replicates_over_replicate_and_does_without_it():
    assert layouts.hsdp(mesh_of(replicate=2, efsdp=4))(moe())["norm"] == P("efsdp")
    assert layouts.hsdp(mesh_of(efsdp=4, ep=2))(moe())["norm"] == P(("efsdp", "ep"))
    assert layouts.hsdp(mesh_of(replicate=4))(moe())["norm"] == P()


def test_dp2ep():
    specs = layouts.dp2ep(mesh_of(replicate=2, efsdp=2, ep=4))(moe())
    dense, (layer,) = ("efsdp", "ep"), specs["layers"]
    assert specs["embed"] == P(None, dense) and specs["norm"] == P(dense) and layer["router"] == P(dense)
    assert layer["w_in"] == layer["w_out"] == layer["bias"] == P(("ep", "efsdp"))


def test_dp2ep_falls_back_to_a_weight_dim():
    """fsdp * ep > experts: nothing would be left of dim 0 (torchtitan#1561)."""
    mesh = mesh_of(efsdp=4, ep=2)
    tree = moe(experts=4)
    (layer,) = layouts.dp2ep(mesh)(tree)["layers"]
    assert layer["w_in"] == layer["w_out"] == layer["bias"] == P("ep", "efsdp")
    for name, spec in layer.items():
        assert all(numel_on(rank, tree["layers"][0][name], spec, mesh) > 0 for rank in range(8))


def test_the_weight_dim_is_one_that_divides_if_there_is_one():
    mesh = mesh_of(efsdp=4, ep=2)
    layout = layouts.dp2ep(mesh)
    assert layout(Param((2, 6, 8), axes=("expert", "embed", "mlp"))) == P("ep", None, "efsdp")
    assert layout(Param((2, 6, 10), axes=("expert", "embed", "mlp"))) == P("ep", None, "efsdp")
    assert layout(Param((2, 8, 6), axes=("expert", "embed", "mlp"))) == P("ep", "efsdp")


def test_legacy_ep_replicates_dense_over_ep():
    (layer,) = (specs := layouts.legacy_ep(mesh_of(efsdp=2, ep=4))(moe()))["layers"]
    assert specs["embed"] == P(None, "efsdp") and specs["norm"] == P("efsdp")
    assert layer["w_in"] == P(("ep", "efsdp"))


def test_dense_tuples_follow_the_mesh_order():
    assert layouts.dp2ep(mesh_of(ep=2, efsdp=2))(moe())["norm"] == P(("ep", "efsdp"))


def test_axes_of_size_one_are_kept():
    """So that specs read the same on all meshes."""
    wide, narrow = mesh_of(replicate=2, efsdp=2, ep=4), mesh_of(replicate=1, efsdp=1, ep=1)
    assert layouts.dp2ep(narrow)(moe())["layers"] == layouts.dp2ep(wide)(moe())["layers"]
    assert layouts.dp2ep(narrow)(moe())["norm"] == P(("efsdp", "ep"))


@pytest.mark.parametrize("make", [layouts.dp2ep, layouts.legacy_ep])
def test_missing_axes_are_named(make):
    text = message(lambda: make(mesh_of(efsdp=4)))
    assert '"ep"' in text and "efsdp" in text and "size 1" in text
    assert '"efsdp"' in message(lambda: make(mesh_of(dp=4, ep=2)))


def test_experts_that_ep_does_not_divide_are_an_error():
    text = message(lambda: layouts.dp2ep(mesh_of(efsdp=2, ep=4))(moe(experts=6)))
    assert all(word in text for word in ("layers[0].bias", "dim 0", "size 6", "ep=4", "layout.replace")), text


def test_a_leaf_without_a_free_dim_is_an_error():
    text = message(lambda: layouts.dp2ep(mesh_of(efsdp=4, ep=2))({"b": Param((2,), axes=("expert",))}))
    assert text.startswith("b has the shape (2,)") and "no free dim" in text and "efsdp" in text


def test_leaves_must_be_described():
    assert layouts.fsdp(mesh_of(a=2))({"w": torch.ones(4, 4)}) == {"w": P("a")}
    assert "Param(shape, axes=...)" in message(lambda: layouts.dp2ep(mesh_of(efsdp=2, ep=2))({"w": torch.ones(4)}))
    assert "w is a str" in message(lambda: layouts.fsdp(mesh_of(a=2))({"w": "text"}))


def test_layouts_print_and_edit():
    layout = layouts.dp2ep(mesh_of(efsdp=2, ep=2))
    text = repr(layout)
    assert text.splitlines()[0].startswith("layout dp2ep on make_mesh(")
    assert '1. experts, both on the expert dim: leaves with "expert": expert over ep·efsdp (must divide)' in text
    assert "3. dense: any leaf: any dim over efsdp·ep" in text
    edited = layout.replace("dense", Rule("tables", "vocab", ((("vocab",), ("efsdp", "ep")),)),
                            Rule("rest", None, ()))
    specs = edited(moe())
    assert specs["embed"] == P(("efsdp", "ep")) and specs["norm"] == P()
    assert "rest: any leaf: replicated" in repr(edited)
    assert layout(moe())["norm"] == P(("efsdp", "ep"))  # the first one is as it was
    assert len(layout.replace("dense").rules) == 2
    assert '"dens"' in message(lambda: layout.replace("dens")) and "dense" in message(lambda: layout.replace("dens"))
    assert "no rule is for it" in message(lambda: layout.replace("dense")(moe()))
    assert "vocab" in message(lambda: Layout("mine", layout.mesh, (Rule("r", None, (("vocab", ("ep",)),)),))(moe()))


@pytest.mark.parametrize(("efsdp", "ep"), [(4, 2), (16, 4), (64, 8)])
def test_memory_per_rank(efsdp, ep):
    """Of a large model each rank holds its share, no rank more than the rounding allows; legacy holds ep times the
    dense part."""
    mesh, tree = mesh_of(efsdp=efsdp, ep=ep), moe(experts=64, width=256, hidden=512, vocab=1009)

    def held(rank, layout):
        specs = layout(mesh)(tree)
        dense = sum(numel_on(rank, tree[key], specs[key], mesh) for key in ("embed", "norm"))
        return dense, sum(numel_on(rank, tree["layers"][0][key], specs["layers"][0][key], mesh)
                          for key in ("w_in", "w_out"))

    dense = sum(math.prod(tree[key].shape) for key in ("embed", "norm"))
    experts = sum(math.prod(tree["layers"][0][key].shape) for key in ("w_in", "w_out"))
    for rank in (0, 1, mesh.size // 2, mesh.size - 1):
        new, old = held(rank, layouts.dp2ep), held(rank, layouts.legacy_ep)
        assert new[1] == old[1] == experts // mesh.size
        assert old[0] <= dense / efsdp + 1010
        assert new[0] <= dense / mesh.size + 1010


def test_tensor_parallel_cuts_heads_by_columns_and_rows():
    mesh = make_mesh({"efsdp": 2, "ep": 2, "tp": 2}, model_axes=("tp",), fake=True)
    layout = layouts.tensor_parallel(layouts.dp2ep(mesh))
    tree = {**moe(), "w_q": Param((16, 32), axes=("embed", "heads")), "w_o": Param((32, 16), axes=("heads", "embed")),
            "b_k": Param((8,), axes=("kv_heads",)), "w_k": Param((15, 8), axes=("embed", "kv_heads"))}
    got = layout(tree)
    assert got["w_q"] == P(("efsdp", "ep"), "tp") and got["w_o"] == P("tp", ("efsdp", "ep"))
    assert got["b_k"] == P("tp") and got["w_k"] == P(("efsdp", "ep"), "tp")
    for name, spec in layouts.dp2ep(mesh)(moe()).items():
        assert got[name] == spec
    assert "heads over tp: leaves with \"heads\"" in repr(layout)
    assert "needs dim 1 (\"heads\", size 5)" in message(
        lambda: layout({"w": Param((16, 5), axes=("embed", "heads"))}))
    assert 'is none of this mesh (it has none)' in message(
        lambda: layouts.tensor_parallel(layouts.fsdp(mesh_of(efsdp=2, tp=2))))
    assert "has no rule for any leaf" in message(
        lambda: layouts.tensor_parallel(Layout("mine", mesh, (Rule("e", "expert", ()),))))
