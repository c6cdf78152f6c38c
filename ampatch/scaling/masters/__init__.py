"""FP32 master weights and their half weights: values, writes, gradients.

Values are compared in `comparison`.  Writes by the user's code are noted in `writes` and
`handed_out`, and `writers` says which tensor of a pair they changed.  Gradients come from half
weights to masters by `half_gradients` and `arrivals`; `averages` has those of all ranks.
"""
