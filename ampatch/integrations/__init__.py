"""Integrations: one line in a framework's terms turns ampatch on.

Each module is for one framework and imports it.  The modules use the public API of `ampatch`, and
the facade of sessions.  In the rest of ampatch only the sweep imports this package, by
`framework_patches.py`.

* Lightning's Trainer and Fabric: `lightning/`
* transformers' Trainer: `transformers.py`
* accelerate: `accelerate.py`
* timm's train.py: `timm.py`
* ignite's engines: `ignite.py`
* one of the first four, installed from outside for a sweep: `framework_patches.py`
* the session that they share, and its loss scale: `integration_session.py`
* the end of gloo's threads, for scripts that do not destroy their process group: `process_end.py`
"""
