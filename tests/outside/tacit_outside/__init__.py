"""One codec, rule, scheme, schedule, topology and job from outside tacit, a file each."""
