"""Numerical parts with no word of networks: eigenvectors, small cone programs, threads."""
