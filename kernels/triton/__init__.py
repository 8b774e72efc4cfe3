"""Our own GPU kernels, one a file, each with the function that launches it. Imported only on GPUs."""
