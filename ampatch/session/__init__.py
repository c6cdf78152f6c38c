"""One `initialize`: where the operator and the optimizer side meet.

Where to look first:

* one session: `session`; what it casts: `policies`;
* who manages a model or an optimizer: `object_registry`, one per process;
* the other objects of which a process has only one: `registry`; who is notified of events:
  `observers`; which tools of torch are replaced: `torch_tools`; the settings that ranks compare:
  `ranks`;
* what the packages above the public API, and code for other frameworks, may import: `facade`.
"""
