"""What a program computes, captured from outside: outputs and gradients of modules, dropout masks, float32 islands."""
