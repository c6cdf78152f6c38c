"""One `initialize`: where the operator and the optimizer side meet.

Where to look first:

* one session: `session`; what it casts: `policies`;
* who manages a model or an optimizer: `object_registry`, one per process;
* what else a process has once: `registry`; who is notified of events: `observers`; which tools of
  torch are replaced, and what they ask: `torch_tools`; what the ranks of one model compare:
  `ranks`;
* what the rooms above the public API, and code for other frameworks, may import: `facade`.
"""
