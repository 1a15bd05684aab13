"""Operations with a reference that defines them and faster implementations that must equal it."""
