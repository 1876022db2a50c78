"""Turn documents into token files, ahead of training or in the cache of a run."""
