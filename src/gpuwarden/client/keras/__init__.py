"""The Keras callback and its parts."""
