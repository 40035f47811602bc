"""RecStore collections dealt out to the ranks of a ``DistributedModelParallel`` model."""
