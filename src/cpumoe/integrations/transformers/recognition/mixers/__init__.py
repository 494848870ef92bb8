"""The kinds of mixers that the native decoder has, one file each."""
