"""Loss, loss scale, learning rate: does the training get anywhere?"""
