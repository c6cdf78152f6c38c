"""Stand-in."""
import importlib.util, os
part = None
if os.environ.get("AMPATCH_NATIVE") != "0" and os.path.exists(os.environ.get("NATIVE_SO", "/tmp/nat2/b/_ampatch_native.so")):
    _spec = importlib.util.spec_from_file_location("_ampatch_native", os.environ.get("NATIVE_SO", "/tmp/nat2/b/_ampatch_native.so"))
    part = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(part)
