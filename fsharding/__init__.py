"""Functional sharding for PyTorch: write what one device would compute, let the mesh decide where it happens."""

from fsharding import interop, moe, nn, optim, policies, random
from fsharding.annotate import layouts
from fsharding.annotate.mesh import Mesh, make_mesh
from fsharding.annotate.param import Param, ShapeDtype, init
from fsharding.annotate.place import device_get, device_put, from_local, reshard, spec_of
from fsharding.annotate.simulate import simulate
from fsharding.annotate.spec import P
from fsharding.comm.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
)
from fsharding.errors import ShardingError
from fsharding.moe import ragged_dot
from fsharding.program.constrain import constrain
from fsharding.program.explain import Collective
from fsharding.program.partition import Experts
from fsharding.program.plain import disable_jit
from fsharding.program.remat import name, remat
from fsharding.program.scan import scan
from fsharding.program.schedule import Schedule
from fsharding.program.shard import shard
from fsharding.program.shard_map import shard_map
from fsharding.program.table import register_rule, rules
from fsharding.program.transforms import Precision, accumulate, grad, microbatches, value_and_grad
from fsharding.version import __version__

__all__ = [
    "__version__",
    "Collective",
    "Experts",
    "Mesh",
    "P",
    "Param",
    "Precision",
    "Schedule",
    "ShapeDtype",
    "ShardingError",
    "accumulate",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "constrain",
    "device_get",
    "device_put",
    "disable_jit",
    "from_local",
    "grad",
    "init",
    "interop",
    "layouts",
    "make_mesh",
    "microbatches",
    "moe",
    "name",
    "nn",
    "optim",
    "pmax",
    "pmean",
    "pmin",
    "policies",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "ragged_dot",
    "random",
    "register_rule",
    "remat",
    "reshard",
    "rules",
    "scan",
    "shard",
    "shard_map",
    "simulate",
    "spec_of",
    "value_and_grad",
]
