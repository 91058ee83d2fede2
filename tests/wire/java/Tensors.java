import com.google.protobuf.ByteString;
import inference.Inference.InferTensorContents;
import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;

/** Conversion between the report's texts and a tensor's elements, raw and typed. */
final class Tensors {
  private Tensors() {}

  private static int width(String datatype) {
    return switch (datatype) {
      case "BOOL", "INT8", "UINT8" -> 1;
      case "INT16", "UINT16", "FP16", "BF16" -> 2;
      case "INT32", "UINT32", "FP32" -> 4;
      case "INT64", "UINT64", "FP64" -> 8;
      default -> throw new IllegalArgumentException(datatype);
    };
  }

  static ByteString encode(String datatype, List<String> texts) {
    if (datatype.equals("BYTES")) {
      return encodeStrings(texts);
    }
    ByteBuffer encoded = ByteBuffer.allocate(width(datatype) * texts.size()).order(ByteOrder.LITTLE_ENDIAN);
    for (String text : texts) {
      switch (datatype) {
        case "BOOL" -> encoded.put((byte) (text.equals("true") ? 1 : 0));
        case "FP32" -> encoded.putFloat(Float.parseFloat(text));
        case "FP64" -> encoded.putDouble(Double.parseDouble(text));
        case "INT64" -> encoded.putLong(Long.parseLong(text));
        case "UINT64" -> encoded.putLong(Long.parseUnsignedLong(text));
        case "INT32", "UINT32" -> encoded.putInt((int) Long.parseLong(text));
        // FP16 and BF16 have no type in Java 17, so their 16 bits are written.
        case "INT16", "UINT16", "FP16", "BF16" -> encoded.putShort((short) Integer.parseInt(text));
        default -> encoded.put((byte) Integer.parseInt(text));
      }
    }
    return ByteString.copyFrom(encoded.flip());
  }

  static List<String> decode(String datatype, ByteString bytes) {
    if (datatype.equals("BYTES")) {
      return decodeStrings(bytes);
    }
    ByteBuffer encoded = bytes.asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
    List<String> texts = new ArrayList<>();
    while (encoded.hasRemaining()) {
      texts.add(switch (datatype) {
        case "BOOL" -> String.valueOf(encoded.get() == 1);
        case "FP32" -> String.valueOf(encoded.getFloat());
        case "FP64" -> String.valueOf(encoded.getDouble());
        case "INT64" -> String.valueOf(encoded.getLong());
        case "UINT64" -> Long.toUnsignedString(encoded.getLong());
        case "INT32" -> String.valueOf(encoded.getInt());
        case "UINT32" -> Integer.toUnsignedString(encoded.getInt());
        case "INT16" -> String.valueOf(encoded.getShort());
        case "UINT16", "FP16", "BF16" -> String.valueOf(Short.toUnsignedInt(encoded.getShort()));
        case "INT8" -> String.valueOf(encoded.get());
        default -> String.valueOf(Byte.toUnsignedInt(encoded.get()));
      });
    }
    return texts;
  }

  /** Each element of BYTES is its length in four bytes, then its bytes. */
  private static ByteString encodeStrings(List<String> texts) {
    ByteArrayOutputStream encoded = new ByteArrayOutputStream();
    for (String text : texts) {
      byte[] element = text.getBytes(StandardCharsets.UTF_8);
      encoded.writeBytes(ByteBuffer.allocate(4).order(ByteOrder.LITTLE_ENDIAN).putInt(element.length).array());
      encoded.writeBytes(element);
    }
    return ByteString.copyFrom(encoded.toByteArray());
  }

  private static List<String> decodeStrings(ByteString bytes) {
    ByteBuffer encoded = bytes.asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
    List<String> texts = new ArrayList<>();
    while (encoded.hasRemaining()) {
      byte[] element = new byte[encoded.getInt()];
      encoded.get(element);
      texts.add(new String(element, StandardCharsets.UTF_8));
    }
    return texts;
  }

  static boolean hasContents(String datatype) {
    return !datatype.equals("FP16") && !datatype.equals("BF16");
  }

  static InferTensorContents toContents(String datatype, List<String> texts) {
    InferTensorContents.Builder contents = InferTensorContents.newBuilder();
    for (String text : texts) {
      switch (datatype) {
        case "BOOL" -> contents.addBoolContents(text.equals("true"));
        case "INT8", "INT16", "INT32" -> contents.addIntContents(Integer.parseInt(text));
        case "INT64" -> contents.addInt64Contents(Long.parseLong(text));
        case "UINT8", "UINT16", "UINT32" -> contents.addUintContents(Integer.parseUnsignedInt(text));
        case "UINT64" -> contents.addUint64Contents(Long.parseUnsignedLong(text));
        case "FP32" -> contents.addFp32Contents(Float.parseFloat(text));
        case "FP64" -> contents.addFp64Contents(Double.parseDouble(text));
        default -> contents.addBytesContents(ByteString.copyFromUtf8(text));
      }
    }
    return contents.build();
  }

  static List<String> fromContents(String datatype, InferTensorContents contents) {
    return switch (datatype) {
      case "BOOL" -> contents.getBoolContentsList().stream().map(String::valueOf).toList();
      case "INT8", "INT16", "INT32" -> contents.getIntContentsList().stream().map(String::valueOf).toList();
      case "INT64" -> contents.getInt64ContentsList().stream().map(String::valueOf).toList();
      case "UINT8", "UINT16", "UINT32" ->
          contents.getUintContentsList().stream().map(Integer::toUnsignedString).toList();
      case "UINT64" -> contents.getUint64ContentsList().stream().map(Long::toUnsignedString).toList();
      case "FP32" -> contents.getFp32ContentsList().stream().map(String::valueOf).toList();
      case "FP64" -> contents.getFp64ContentsList().stream().map(String::valueOf).toList();
      default -> contents.getBytesContentsList().stream().map(ByteString::toStringUtf8).toList();
    };
  }
}
