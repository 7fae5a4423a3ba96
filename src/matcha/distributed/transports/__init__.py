"""How bytes reach another worker: torch.distributed, MPI, threads of one process."""
