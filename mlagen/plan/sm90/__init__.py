"""Plans of the sm90 kernels (Gluon), one module per family, and the code that they share."""
