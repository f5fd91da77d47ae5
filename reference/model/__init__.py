"""The dense decoder: parameters, layers, the model as one pure function, loss and metric."""
