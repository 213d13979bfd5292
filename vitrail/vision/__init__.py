"""Pictures: from a client's bytes to patches, and from patches to embeddings.

Owns the one normalisation of images, the mechanism that cuts them into patches, the expansion of
image slots in a prompt, and the vision towers with the only attention they may use. `image`,
`preprocess` and `placeholders` import no torch. Refuses to know any model's sizes (its processor
lives with the model), tokenisation, scheduling and HTTP; opens no network connection."""
