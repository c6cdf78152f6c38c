"""Today's frameworks: one line of theirs turns ampatch on.

Each module is for one framework and imports it; of the rest of ampatch the sweep alone imports this
package, by `framework_patches.py`.
Above the public API: these modules use `ampatch` as a script does, and the declared facade.

* Lightning's Trainer and Fabric: `lightning/`
* transformers' Trainer: `transformers.py`
* accelerate: `accelerate.py`
* timm's train.py: `timm.py`
* ignite's engines: `ignite.py`
* any of the first four, put in from outside for a sweep: `framework_patches.py`
* the session that they share, and its loss scale: `managed.py`
* gloo's threads, for scripts that end no process group: `process_end.py`
"""
