"""What a vision tower does between its products: samples to numbers, learned positions on any
grid, 2-D rotations, layer norms with the residual before them. Knows no weights' names."""
