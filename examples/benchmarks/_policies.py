
import sys, torch
sys.argv = ["x"]
import importlib.util
s = importlib.util.spec_from_file_location("b", "examples/benchmarks/kernels.py")
b = importlib.util.module_from_spec(s); s.loader.exec_module(b)
from kernels import experts, route, glu, wgrad, rows, table
from kernels.tune import timed
P = {"none": (), "g": ("g",), "x": ("x",), "sum": ("sum",), "x+sum": ("x", "sum"), "all": ("g", "x", "sum")}
for li, kind in ((0, "balanced"), (0, "zipf"), (3, "balanced"), (2, "balanced"), (4, "balanced")):
    e = b.LAYERS[li]
    x, w_in, w_out, ids, wt, g = b.layer_inputs(e, kind)
    r = route(ids, w_in.shape[0])
    out, h = experts.forward_launch(x, w_in, w_out, wt, *r, "swiglu", True)
    fn = {k: (lambda v=v: experts.backward_launch(g, x, w_in, w_out, wt, h, *r, "swiglu", (True,) * 4, beside=frozenset(v))) for k, v in P.items()}
    o, bl = r.offsets, r.blocks
    fn["fwd"] = lambda: experts.forward_launch(x, w_in, w_out, wt, *r, "swiglu", True)
    fn["route"] = lambda: route(ids, w_in.shape[0])
    fl = 4 * e[5] * e[2] * 3 * e[3] * e[4] / 1e9
    t = timed(fn, 9, pause=6_000_000)
    print(e[0], kind, {k: (round(v, 3), round((fl if k in P else fl / 2) / v)) for k, v in t.items()}, flush=True)
e = b.LAYERS[0]
x, w_in, w_out, ids, wt, g = b.layer_inputs(e, "balanced")
r = route(ids, w_in.shape[0])
out, h = experts.forward_launch(x, w_in, w_out, wt, *r, "swiglu", True)
from torch.profiler import profile, ProfilerActivity
for pol in ("none", "all"):
    f = lambda: experts.backward_launch(g, x, w_in, w_out, wt, h, *r, "swiglu", (True,) * 4, beside=frozenset(P[pol]))
    f(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        torch.cuda._sleep(20_000_000)
        f()
        torch.cuda.synchronize()
    ev = [k for k in p.events() if k.device_type == torch.autograd.DeviceType.CUDA]
    ev.sort(key=lambda k: k.time_range.start)
    t0 = ev[0].time_range.end
    print(pol)
    for k in ev: print(f"  {k.time_range.start-t0:9.0f} us +{k.time_range.elapsed_us():8.0f} {k.name[:50]}")
