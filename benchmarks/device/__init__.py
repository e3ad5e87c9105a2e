"""What only a machine with an accelerator can show, measured by one command within some minutes.

    make device
    python -m benchmarks.device [--minutes 8] [-o FOLDER] [--parts NAME ...]

Parts run one after another, each in a process of its own with a time limit, and what they find is on disk as soon as
it is found. At the end every claim that README and docs make about accelerators is held against it: `results.json`,
`page.md` to paste into an issue or into `benchmarks/LOG.md`, traces beside them. The exit status is 1 where a claim
does not hold. `docs/devices.md` has the rest.

From below: `outcomes` (what is kept on disk), `scene` (device, sizes and time of a part), `link` (what the device's
link carries), `sleeps` (a device whose streams are held up), `traces` (a profiler's trace, read), then a module a part:
`build`, `here`, `probes`, `copies`, `sweep`, `training`, `profiled`, `identity`, `memory`, `described`; `parts` (all
of them in order), `part` (a part's own process), `children` (starting and ending it); `answers`, `rules`, `link_rules`
and `claims` (what is held against what); `cells`, `page_parts` and `page` (what a person reads), `__main__`.
"""
