"""Functional sharding for PyTorch: write what one device would compute, let the mesh decide where it happens."""

from fsharding import moe, optim, random
from fsharding.annotate import layouts
from fsharding.annotate.mesh import Mesh, make_mesh
from fsharding.annotate.param import Param, ShapeDtype, init
from fsharding.annotate.place import device_get, device_put, from_local, reshard, spec_of
from fsharding.annotate.spec import P
from fsharding.errors import ShardingError
from fsharding.moe import ragged_dot
from fsharding.program.explain import Collective
from fsharding.program.partition import Experts
from fsharding.program.plain import disable_jit
from fsharding.program.shard import Schedule, shard
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
    "device_get",
    "device_put",
    "disable_jit",
    "from_local",
    "grad",
    "init",
    "layouts",
    "make_mesh",
    "microbatches",
    "moe",
    "optim",
    "ragged_dot",
    "random",
    "register_rule",
    "reshard",
    "rules",
    "shard",
    "spec_of",
    "value_and_grad",
]
