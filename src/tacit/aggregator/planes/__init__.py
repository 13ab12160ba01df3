"""What adds: two implementations of the slot rule of spec.py, in user space (C++) and in the kernel (BPF), and their figures."""
