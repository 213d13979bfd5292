"""What stands before the attention of a layer that keeps keys and values by head: projected rows
become queries, and keys and values in their slots. Knows no layer and no cache but the slots that
it is given."""
