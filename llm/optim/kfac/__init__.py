"""Second-order training: the Kronecker-factored curvature of linear layers.

For a layer y = W x + b, with a = [x, 1] and g the gradient of one token's loss with regard to y,
K-FAC (Martens & Grosse 2015, arXiv:1503.05671) describes the loss around the weights by two small
matrices, A = E[a a^T] and G = E[g g^T].

    make             from the options to all that a run with K-FAC has
    layers           which modules are covered, and why the others are not
    statistics       hooks that gather a a^T and g g^T of one step
    factors          the moving averages A and G
    curvature        all of it together with the factors' eigenbases, and when what is due
    ekfac            AdamW in the eigenbasis: an optimizer
    preconditioner   G^-1 dW A^-1: a gradient for any optimizer
"""
