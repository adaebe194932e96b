import sys, torch, statistics
from pathlib import Path
from mlagen.bench.package import load_package
from mlagen.bench.families.mqa_logits import *
from mlagen.bench.families.mqa_logits import logits_error
from mlagen.bench.measure import device_timer, flush_l2, interleave
from mlagen.bench.peers import mqa_logits as dg
dev=torch.device("cuda",0); torch.manual_seed(0)
def forced(p, call):
    def f():
        with p.root._launch.force(kernel="portable"): return call()
    return f
for name in ("dsv32","glm5"):
    p=load_package(Path("generated")/name); lay=layout_of(p); h=p.spec["indexer"]["num_heads"]
    flush=flush_l2(dev)
    for keys in (8192,32768,131072):
        s=LogitsShape(FLAT,1,4096,h,keys); x=make_flat_inputs(s,lay,dev,1)[0]
        ours=logits_call(FLAT,p.wrapper(FLAT),None,x); port=forced(p,ours)
        calls={"ours":ours,"portable":port,"DeepGEMM":dg.prepare(FLAT,x)}
        errs={n: logits_error(x,c) for n,c in calls.items()} if keys<=32768 else {}
        r=interleave({n:device_timer([c],flush)[0] for n,c in calls.items()},5)
        print(s, {n:round(v*1e6,1) for n,v in r.seconds.items()}, "DeepGEMM/ours", round(r.ratios["DeepGEMM"],3), "DeepGEMM/portable", round(r.seconds["DeepGEMM"]/r.seconds["portable"],3), {n:f"{e:.1e}" for n,e in errs.items()}, flush=True)
    sch=p.wrapper(SCHEDULE)
    for b,s_q,keys in ((1,1,4096),(1,1,32768),(16,1,4096),(16,1,32768),(64,1,32768),(64,1,65536),(128,1,32768),(64,2,32768)):
        s=LogitsShape(PAGED,b,s_q,h,keys); xs=make_paged_inputs(s,lay,64,dev,3)
        ours=[logits_call(PAGED,p.wrapper(PAGED),sch,x) for x in xs]
        calls={"ours":ours,"portable":[forced(p,c) for c in ours],"DeepGEMM":[dg.prepare(PAGED,x) for x in xs]}
        r=interleave({n:device_timer(c,flush)[0] for n,c in calls.items()},5)
        print(s, {n:round(v*1e6,1) for n,v in r.seconds.items()}, "DeepGEMM/ours", round(r.ratios["DeepGEMM"],3), "DeepGEMM/portable", round(r.seconds["DeepGEMM"]/r.seconds["portable"],3), flush=True)
