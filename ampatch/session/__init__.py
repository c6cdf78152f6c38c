"""One `initialize`; the only room that knows the operator and the optimizer side.

Where to look first:

* one session: `session`; its `members`, `policies`;
* what a process has once: `registry`; which session has an object: `index`; which objects are told
  of events: `observers`; which tools of torch are replaced: `torch_tools`; what they and torch's
  hooks tell: `torch_events`; what the ranks of one model compare: `rank_settings`;
* objects that stand for an optimizer: `wrapped_optimizers`;
* a second `initialize` of the same objects: `transfer`;
* the block around forwards whose weights do not change: `cached_weights`;
* what the rooms above the public API, and code for other frameworks, may import: `facade`.
"""
