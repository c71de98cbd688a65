"""What GPU kernels need besides values: compilers, the host harness, bindings."""
