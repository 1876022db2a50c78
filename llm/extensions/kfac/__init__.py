"""K-FAC: the Kronecker-factored curvature of linear layers.

For a layer y = W x + b, with a = [x, 1] and g the gradient of one token's loss with respect to y,
K-FAC (Martens & Grosse 2015, arXiv:1503.05671) approximates the curvature of the loss by two small
matrices, A = E[a a^T] and G = E[g g^T].

    make_kfac        from the options to K-FAC and its optimizer
    layers           which layers are covered, and why the others are not
    factors          hooks that record a step's tokens, and the moving averages A and G
    curvature        the factors with their eigenbases, and when each is updated
    distribution     which rank computes what, and what ranks send
    ekfac            AdamW in the eigenbasis: an optimizer
    preconditioner   G^-1 dW A^-1: a gradient for any optimizer
    external         the kfac-pytorch library as the preconditioner
"""
