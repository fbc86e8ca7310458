"""What teams gain, and which algorithm to take: every claim is a YAML file for `jmarl train`, repeated over seeds.

`plan.yaml` says what each may cost and when it ends, `results/` has the numbers of each finished run, and EVIDENCE.md, which is
drawn from them, what came of it. Open `__main__.py` first.
"""
